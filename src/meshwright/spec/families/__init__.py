"""The architectures that Meshwright supports, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from meshwright.spec.families.arcee import ARCEE
from meshwright.spec.families.bamba import BAMBA
from meshwright.spec.families.base import Family
from meshwright.spec.families.deepseek_v3 import DEEPSEEK_V3
from meshwright.spec.families.dots1 import DOTS1
from meshwright.spec.families.ernie4_5 import ERNIE4_5
from meshwright.spec.families.exaone4 import EXAONE4
from meshwright.spec.families.gemma import GEMMA
from meshwright.spec.families.gemma2 import GEMMA2
from meshwright.spec.families.gemma3 import GEMMA3
from meshwright.spec.families.glm4 import GLM4
from meshwright.spec.families.glm4_moe import GLM4_MOE
from meshwright.spec.families.gpt_oss import GPT_OSS
from meshwright.spec.families.granite import GRANITE
from meshwright.spec.families.granitemoehybrid import GRANITEMOEHYBRID
from meshwright.spec.families.llama import LLAMA
from meshwright.spec.families.minimax_m2 import MINIMAX_M2
from meshwright.spec.families.mistral import MISTRAL
from meshwright.spec.families.mixtral import MIXTRAL
from meshwright.spec.families.neox import NEOX
from meshwright.spec.families.olmo2 import OLMO2
from meshwright.spec.families.olmo3 import OLMO3
from meshwright.spec.families.olmoe import OLMOE
from meshwright.spec.families.phi3 import PHI3
from meshwright.spec.families.qwen2 import QWEN2
from meshwright.spec.families.qwen2_moe import QWEN2_MOE
from meshwright.spec.families.qwen3 import QWEN3
from meshwright.spec.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from meshwright.spec.families.qwen3_moe import QWEN3_MOE
from meshwright.spec.families.qwen3_next import QWEN3_NEXT
from meshwright.spec.families.seed_oss import SEED_OSS
from meshwright.spec.families.smollm3 import SMOLLM3
from meshwright.spec.families.starcoder2 import STARCODER2

FAMILIES: Final[Mapping[str, Family]] = {
    family.name: family
    for family in (
        *(LLAMA, NEOX, QWEN2, QWEN3, MISTRAL, GRANITE, PHI3),
        *(GEMMA2, GEMMA3, OLMO2, OLMO3, SMOLLM3),
        *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK_V3, GPT_OSS),
        *(SEED_OSS, GEMMA, STARCODER2, GLM4_MOE, DOTS1, MINIMAX_M2),
        *(GLM4, ERNIE4_5, EXAONE4, ARCEE),
        *(QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE, GRANITEMOEHYBRID, BAMBA),
    )
}
