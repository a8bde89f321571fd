"""The folder that `meshwright prove -- COMMAND` adds to PYTHONPATH: see `sitecustomize.py`."""

from typing import Final

# The environment variable with the folder and the number of steps, as JSON.
ORDER: Final = "MESHWRIGHT_WATCH"
# Each process that is watched leaves a file of this name in the folder, with its pid after it.
REACHED: Final = "process-"
