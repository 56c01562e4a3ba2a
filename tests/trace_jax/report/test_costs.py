"""What a run has cost: hours of devices at list prices, and LLM agents."""

import pytest

from tests.trace_jax.example_run import add_costs
from tests.trace_jax.report.pages import written
from trace_jax import report
from trace_jax.preflight.cost import find_price
from trace_jax.report.costs import costs


def test_device_hours_are_priced_where_the_kind_is_known(workdir):
    add_costs(workdir)
    price = find_price("v5e")
    found = costs(report.WorkdirReader(workdir), "jax")
    tpu, cpu = found["devices"]
    assert tpu["hours"] == 16 and tpu["dollars"] == pytest.approx({"on_demand": 16 * price.on_demand, "spot": 16 * price.spot})
    assert cpu["price"] is None and cpu["dollars"] is None
    said = written(workdir).said("costs")
    assert f"${16 * price.on_demand:.2f} ${16 * price.spot:.2f}" in said and "An estimate: device-hours at the list prices of 20" in said
    assert "1,640" in said and "$4.10" in said


def test_on_a_cpu_there_are_hours_alone(workdir):
    add_costs(workdir)
    spent = workdir.read_json("spent.json")
    workdir.write_json("spent.json", spent | {"devices": spent["devices"][1:]})
    said = written(workdir).said("costs")
    assert "cpu 1 1 min 00 s 0.0167" in said and "list prices" not in said


def test_a_run_of_old_says_that_it_has_not_noted_its_devices(workdir):
    add_costs(workdir)
    spent = workdir.read_json("spent.json")
    del spent["devices"], spent["agents"]
    workdir.write_json("spent.json", spent)
    said = written(workdir).said("costs")
    assert "has not written down which devices" in said and "LLM agents" not in said
