"""Adapters of experts, of shared experts and of latent attention: layouts, faults, what is asked."""

import pytest

from meshwright.errors import ConfigError
from meshwright.execute.parallel import Parallel
from meshwright.execute.transport.groups import open_groups
from meshwright.models import build_model
from meshwright.models.experts import Experts
from meshwright.prove.parity import check
from meshwright.simulate.run import simulate
from meshwright.spec.loading import load_config
from meshwright.spec.parts import parts, trained_parameter_count
from ranks import on_ranks
from test_lora import DROPS, FOUR, MIXTURE, SHARED, case_of, model, proven

ATTENTION = ("q_proj", "v_proj")
# One by one, as files have experts, and in memory.
APART = ("gate_proj", "up_proj", "down_proj")
JOINT = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
OSS = {"family": "gpt_oss", "experts": 4, "top_k": 2}
LATENT = {
    **{"family": "deepseek_v3", "experts": 4, "top_k": 2, "expert_ffn_dim": 32},
    **{"shared_ffn_dim": 32, "dense_layers": 1, "expert_groups": 1, "top_groups": 1},
    **{"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4},
    **{"v_head_dim": 6, "n_kv_heads": 4, "head_dim": 8},
}
OF_LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
CASES = [
    case_of("dp2 mb2", targets=(*ATTENTION, *APART), **MIXTURE),
    case_of("dp1 mb4 recompute-full", targets=JOINT, **MIXTURE),
    case_of("tp2 mb4", targets=APART, **SHARED),
    case_of("tp2 sp mb4", targets=(*JOINT, "o_proj"), **SHARED),
    case_of("tp2 mb4", targets=("gate_up_proj", "down_proj"), **OSS),
    case_of("tp2 mb4 recompute-selective", "bf16", targets=JOINT, **MIXTURE),
    case_of("dp2 ep2 mb2", targets=JOINT, **MIXTURE),
    case_of("shard2 zero3 ep2 mb2 recompute-full", targets=APART, **SHARED),
    case_of("shard2 zero1 mb2", "bf16", targets=APART, **MIXTURE),
    case_of("shard2 zero2 mb2", targets=("down_proj",), **MIXTURE),
    case_of("shard2 zero3 mb2", targets=JOINT, **MIXTURE),
    case_of("pp2 1f1b mb2", targets=("gate_up_proj",), **OSS),
    case_of("dp2 cp2-ring ep2 mb2", targets=(*ATTENTION, *JOINT), **MIXTURE),
    case_of("dp2 tp2 sp ep2 mb2", targets=APART, **SHARED),
    case_of("tp2 mb4", targets=("shared_expert.*", "q_proj"), **SHARED, **DROPS),
    case_of("tp2 sp mb4", targets=OF_LATENT, **LATENT, **DROPS),
    case_of("tp2 mb4 recompute-full", targets=("all-linear",), **LATENT),
    case_of("dp2 ep2 mb2", targets=("*_proj",), **LATENT),
]


@pytest.mark.often(4)
@pytest.mark.parametrize("case", CASES, ids=lambda one: one.label)
def test_layouts_train_the_same_adapters(case):
    for verdicts in on_ranks(case.layout.world, proven, case=case):
        assert [verdict for verdict in verdicts if not verdict.passed] == []
        assert "frozen weights, bit for bit" in [verdict.claim for verdict in verdicts]
