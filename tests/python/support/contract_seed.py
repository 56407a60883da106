"""The seed of the contract harness: another one each time, or what ALLFINITE_CONTRACT_SEED says."""

import os
import time

SEED = int(os.environ.get("ALLFINITE_CONTRACT_SEED") or time.time())
