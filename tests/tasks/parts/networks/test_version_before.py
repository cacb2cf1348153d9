"""Cards and a model.json as the version before wrote them: without how images are read."""

import json
from pathlib import Path

import numpy as np
import pytest

from tasks.core.errors import ArtifactError
from tasks.parts.data.input_card import InputCard
from tasks.parts.data.reading import Reading
from tasks.parts.engines.frame_engine.engine import Engine
from tasks.parts.networks.model_card import ModelCard

STORED = Path(__file__).parent / "version_before"


def test_weights_of_the_version_before_open_with_the_reading_of_a_data_set_a1() -> None:
    text = (STORED / "checkpoint_card.json").read_text(encoding="utf-8")
    reading = Reading(("uint16",), (0.0, 4095.0), "windows", 8)
    assert ModelCard.from_json(text, reading=reading).reading == reading
    with pytest.raises(ArtifactError, match=r"model card cannot be read \(KeyError\('reading'\)\)"):
        ModelCard.from_json(text)
    stored = ModelCard.from_json(text, reading=reading).to_json()
    assert ModelCard.from_json(stored, reading=Reading()).reading == reading, "a card that has one keeps it"


def test_a_graph_of_the_version_before_is_refused_with_the_missing_key_a1() -> None:
    text = (STORED / "graph_card.json").read_text(encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"card of the graph cannot be read \(KeyError\('reading'\)\)"):
        InputCard.from_json(text)


def test_a_bundle_of_the_version_before_is_refused_with_the_missing_key_a1() -> None:
    card = json.loads((STORED / "model.json").read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match=r"model\.json has no 'reading'.*by an older version"):
        Engine(card, np.asarray)
