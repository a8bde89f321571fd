"""The tables of sublayers agree with the parameters of `spec.parts`."""

import pytest

from meshwright.layout import Layout, broken
from meshwright.program.layers.block import backward_workspaces
from meshwright.program.lower import lower
from meshwright.program.operations import operations
from meshwright.program.sizes import Sizes
from meshwright.prove.matrix import matrix
from meshwright.spec.model import ModelSpec
from meshwright.spec.parts import parts
from meshwright.spec.training import OptimizerSpec, TrainSpec

CASES = [case for case in matrix(2) if broken(case.model, case.train, case.layout) is None]
# Queries of latent attention directly from the stream, which never have a bias.
LATENT = ({"attention_bias": True}, {"attention_bias": True, "q_lora_rank": 0})


def models():
    """Yield the models of the matrix, each once, and latent ones in other forms."""
    for model in {str(case.model): case.model for case in CASES}.values():
        yield model
        if model.is_latent:
            yield from (ModelSpec(**{**model.model_dump(), **update}) for update in LATENT)


def inside(model, kind):
    """Return the parameters of a layer by their names in it."""
    single_layer = parts(model.alike(kind, n_layers=1))
    return {
        part.name.removeprefix("layers.0."): part
        for part in single_layer
        if part.name.startswith("layers.")
    }


@pytest.mark.parametrize("words", ["mb1", "tp2 mb1", "tp2 sp mb1"])
def test_a_backward_computes_the_gradients_of_a_layers_parameters(words):
    layout, train = Layout.parse(words), TrainSpec(batch=4, seq_len=32)
    for model in models():
        if broken(model, train, layout) is not None:
            continue
        program = lower(model, train, OptimizerSpec(), layout)
        for kind in model.layer_kinds:
            needs = backward_workspaces(program, Sizes.of(program), kind)
            gradients = {weight for need in needs for weight in need.weights}
            parameters = inside(model, kind)
            assert gradients <= parameters.keys()
            # The bias of a LayerNorm has the gradient with its weight's.
            trained = {name for name, part in parameters.items() if part.trained}
            assert all(name.endswith("norm.bias") for name in trained - gradients)


def test_a_forward_multiplies_by_each_matrix_once():
    for case in CASES:
        program = lower(case.model, case.train, OptimizerSpec(), case.layout)
        for stage in program.stages:
            products = [
                op for op in operations(program, stage) if op.layer and op.kind == "product"
            ]
            for kind in {op.layer for op in products}:
                names = [op.name.removeprefix("layers.*.") for op in products if op.layer == kind]
                matrices = [
                    name.removesuffix(".weight")
                    for name, part in inside(program.model, kind).items()
                    if part.is_matmul
                ]
                assert sorted(names) == sorted(matrices)
