"""AllFinite's C++ core, apart from its ops."""

from types import ModuleType

ops: ModuleType  # by position; the schemas of torch.ops.allfinite say the arguments

def cpu_capability() -> str: ...
def cuda_built() -> bool: ...

STEP_STATUSES: tuple[str, ...]
SKIP_REASONS: tuple[str, ...]

class ScalePolicy:
    def __init__(
        self,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        min_scale: float = 1.0,
        max_scale: float = 16777216.0,
    ) -> None: ...
    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    max_scale: float
    def next(self, scale: float, growth_tracker: int, found_inf: bool) -> tuple[float, int]: ...
    @staticmethod
    def check_scale(name: str, value: float) -> float: ...
    @staticmethod
    def check_tracker(value: int) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    def __getstate__(self) -> tuple[float, float, int, float, float]: ...
    def __setstate__(self, state: tuple[float, float, int, float, float]) -> None: ...
