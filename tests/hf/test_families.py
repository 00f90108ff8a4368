"""The table of model families agrees with the classes in it, and with the names that settings accept."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from twell.hf.families import FAMILIES
from twell.train.config import ARCHITECTURES


def test_settings_accept_every_family():
    assert tuple(FAMILIES) == ARCHITECTURES


@pytest.mark.parametrize("name", FAMILIES)
def test_classes_belong_together(name):
    family = FAMILIES[name]
    assert family.stock_config.model_type == name
    assert family.sparse_config.model_type == f"{name}_sparse_relu"
    assert issubclass(family.sparse_config, family.stock_config)
    assert family.stock_class.config_class is family.stock_config
    assert issubclass(family.sparse_class, family.stock_class)
    assert family.sparse_class.config_class is family.backbone.config_class is family.sparse_config
    assert family.sparse_class.backbone is family.backbone
