"""Values that other systems' arguments may have: each is taken, or refused with its key."""

import contextlib
import random

from meshwright.errors import ConfigError
from meshwright.interop.table import load_table
from test_interop import config_of, imported
from test_interop_experts import DEEPSEEK, MIXTRAL, QWEN3, refused

WORDS = ("0", "1", "-1", "3.5", "1e9", "999999999999", "x", "true", "$X", "")
LISTS = ("[0]*3", "[1]*99999", "([0]+[1])*16", "[[0]]", "4095,0")


def test_any_value_of_an_argument_is_taken_or_refused(tmp_path):
    draw = random.Random(0)
    keys = [key for key in load_table("megatron").rows if "*" not in key]
    for _ in range(150):
        text = draw.choice((MIXTRAL, QWEN3, DEEPSEEK)).rstrip()
        for key in draw.sample(keys, 2):
            text += f" --{key} '{draw.choice(WORDS + LISTS)}'"
        with contextlib.suppress(ConfigError):
            found = imported(tmp_path, text, "run.sh")
            assert found.report.refused or config_of(found)


def test_a_warm_up_that_is_no_number_is_refused(tmp_path):
    text = MIXTRAL.replace("--lr-warmup-iters 500", "--lr-warmup-iters few")
    assert refused(tmp_path, text) == {"lr-warmup-iters": "'few' must be a number"}
