"""What other libraries need to run AllFinite by name; each module here imports its library, which is optional."""
