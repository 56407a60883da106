"""Calls that must be refused, by family: one table each, which test_bad_calls.py runs."""
