"""What is said of an environment that was refused."""

from trace_jax.config import Config
from trace_jax.synthesize import refusal
from trace_jax.workdir import Workdir


def test_all_reasons_of_a_refusal_are_said_and_the_file_that_has_them(tmp_path):
    with Workdir.open(tmp_path, Config()) as workdir:
        assert refusal(workdir, "a", {"usable": False, "reasons": ["the library has no environment for it"]}).endswith("environment for it")
        workdir.write_json("environments/a/certificate.json", {})
        found = {"usable": False, "reasons": ["knobs: none", "faults: boom"]}
        assert refusal(workdir, "a", found) == f"knobs: none; faults: boom; see {tmp_path}/environments/a/certificate.json"
        workdir.write_json("environments/a/calibration.json", {})
        found = {"usable": False, "reasons": ["mean_reward 0.030 is below 0.2", "the hint does not help"]}
        assert refusal(workdir, "a", found).startswith("mean_reward 0.030 is below 0.2; the hint does not help; see ")
        assert refusal(workdir, "a", found).endswith("environments/a/calibration.json")
