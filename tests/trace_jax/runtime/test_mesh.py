import dataclasses

import jax
import pytest

from trace_jax.config import MeshSection
from trace_jax.errors import InputError
from trace_jax.runtime.mesh import make_mesh


def shape(count: int, **axes: int) -> dict[str, int]:
    return dict(make_mesh(MeshSection(**axes), jax.devices()[:1] * count).shape)


def test_one_device_needs_no_mesh():
    assert make_mesh(MeshSection(), jax.devices()[:1]) is None


def test_what_the_given_axes_leave_is_taken():
    assert shape(8) == {"data": 1, "fsdp": 8, "expert": 1, "tensor": 1}
    assert shape(8, expert=4) == {"data": 1, "fsdp": 2, "expert": 4, "tensor": 1}
    assert shape(8, fsdp=2) == {"data": 4, "fsdp": 2, "expert": 1, "tensor": 1}
    assert shape(8, data=2, fsdp=2, tensor=2) == {"data": 2, "fsdp": 2, "expert": 1, "tensor": 2}


@pytest.mark.parametrize(
    "axes, complaint", [({"tensor": 3}, "tensor = 3 does not divide the 8"), ({"data": 1, "fsdp": 2}, "= 2, there are 8")]
)
def test_axes_that_do_not_make_up_the_devices_are_refused(axes, complaint):
    with pytest.raises(InputError, match=complaint):
        shape(8, **axes)


def test_a_run_may_go_on_with_another_mesh():
    assert all(field.metadata["changes"] for field in dataclasses.fields(MeshSection))
