import pytest

from trace_jax.baselines.single import best_capability, makes_adapter


def test_the_best_adapter_is_that_of_the_selection_seeds_not_of_the_held_out_tasks(runtime):
    validation = {"base": 0.9, "adapter:a": 0.4, "adapter:b": 0.6, "gate": 0.8}
    runtime.workdir.write_json("gate/routing.json", {"validation": {name: {"rate": rate} for name, rate in validation.items()}})
    runtime.workdir.write_json("evaluation/adapter-a.json", {"policy": "adapter:a", "overall": {"rate": 1.0}})
    assert best_capability(runtime) == "b"


@pytest.mark.parametrize(
    "folder, split, counts",
    [
        ("base", "train", True),
        ("base", "calibration-look", True),
        ("base", "calibration-look-r2-0123abcd", True),
        ("base", "calibration-look_twice", False),
        ("adapter-look", "training", True),
        ("adapter-look", "validation", True),
        ("adapter-look", "own-look", False),
        ("adapter-look", "gate-look", False),
        ("adapter-other", "training", False),
        ("base", "heldout", False),
    ],
)
def test_an_adapter_costs_diagnosis_calibration_and_training(folder, split, counts):
    assert makes_adapter("look", folder, split) is counts
