"""Recipes: writing, reading, and errors in their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.core.errors import PlanError
from hasten.quantize.recipe import Calibrator, Method, Recipe, read_recipe

PLAIN = Recipe(variant="onnxruntime-int8", method=Method.DYNAMIC, target="amx")
FULL = Recipe(
    variant="onnxruntime-int8+percentile+smooth+split",
    method=Method.STATIC,
    target="avx2",
    reduce_range=True,
    attention=True,
    gelu=True,
    smooth={"/layer.0/query/MatMul": [0, 0, 0, -2, 1, 1], "Attention_1": [0] * 384},
    split={"/layer.0/output/dense/MatMul": [3, 17, 18]},
    keep=("a", "b c"),
    calibrator=Calibrator.PERCENTILE,
    ranges={"x": (-1.25, 3.0000001192092896)},
    bits=4,
    block_size=64,
    calibration="0" * 64,
)


@pytest.mark.parametrize("recipe", [PLAIN, FULL])
def test_recipe_survives_a_round_trip(recipe: Recipe, tmp_path: Path) -> None:
    recipe.write(tmp_path / "recipe.toml")
    assert read_recipe(tmp_path / "recipe.toml") == recipe


def test_recipe_omits_default_values(tmp_path: Path) -> None:
    PLAIN.write(tmp_path / "recipe.toml")
    assert (tmp_path / "recipe.toml").read_text().splitlines() == [
        'variant = "onnxruntime-int8"',
        'method = "dynamic"',
        'target = "amx"',
    ]
    FULL.write(tmp_path / "recipe.toml")
    text = (tmp_path / "recipe.toml").read_text()
    assert 'Attention_1 = "0×384"' in text
    assert '"/layer.0/query/MatMul" = "0×3 -2 1×2"' in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "missing required field"),
        ("variant = 3", "is not a recipe"),
        ('variant = "onnxruntime-int8"\nmethod = "magic"\ntarget = "amx"', "magic"),
        ('variant = "nonsense"\nmethod = "dynamic"\ntarget = "amx"', "not the name of a variant"),
        ('variant = "onnxruntime-int8"\nmethod = "dynamic"\ntarget = "amx"\n[smooth]\na = "1 x"', "is not a recipe"),
        ('variant = "onnxruntime-int8"\nmethod = "dynamic"\ntarget = "amx"\n[smooth]\na = 4', "is not a recipe"),
        (
            'variant = "onnxruntime-int8"\nmethod = "dynamic"\ntarget = "amx"\n[smooth]\na = "0×4 1×999999999"',
            "'1×999999999' makes more than 1048576 channels",
        ),
        ("= = =", "is not a recipe"),
        ('variant = "onnxruntime-int8"\nmethod = "dynamic"\ntarget = "amx"\natention = true', "mean 'attention'"),
    ],
)
def test_invalid_recipe_is_rejected(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(PlanError, match=message):
        read_recipe(tmp_path / "recipe.toml")


def test_missing_recipe_is_reported(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot read the recipe"):
        read_recipe(tmp_path / "recipe.toml")
