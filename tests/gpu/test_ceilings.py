"""Ceilings of products that are no type of torch's, and what a device sustains: on a simulated GPU and, small, on this CPU."""

import pytest
import torch

from nanolib.experiments import doctor
from nanolib.experiments.fp8 import cases as fp8_cases
from nanolib.meters import ceilings
from nanolib.meters.time import latency
from nanolib.models import fp8
from nanolib.models.attention.reference import relative_error
from nanolib.run import peaks_case as cases


@pytest.fixture
def hopper(monkeypatch):
    for module in (doctor, fp8_cases):
        monkeypatch.setattr(module, "resolve_device", lambda _: "cuda:0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_tf32_and_8_bits_have_ceilings_of_their_own_where_the_device_has_them(hopper, monkeypatch):
    found = [str(case) for case in doctor.cases(doctor.Params(dtypes=["float32"], sustained_s=30))]
    kinds = ["float32", "tf32", "fp8"]
    assert found == [
        *(f"ceiling {kind}" for kind in (*kinds, "copy")),
        *(f"ceiling {kind} sustained" for kind in kinds),
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    assert [str(case) for case in doctor.cases(doctor.Params(dtypes=["float32"]))] == [
        "ceiling float32",
        "ceiling copy",
    ]
    assert "8.0" in cases.no_product("tf32", "cuda") and "8.9" in cases.no_product("fp8", "cuda")
    assert "cpu has no tf32" in cases.CeilingCase("cpu", "tf32", 1.0).unsupported()


def test_the_product_of_8_bits_is_that_of_its_operands():
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(64, 64, generator=generator).to(torch.float8_e4m3fn) for _ in range(2))
    columns = b.t().contiguous().t()
    assert relative_error(ceilings._product(a, columns, "fp8")(), a.float() @ b.float()) < 1e-2


def test_products_are_in_tf32_while_they_are_timed_and_as_before_afterwards(monkeypatch):
    products, seen = torch.backends.cuda.matmul, []
    monkeypatch.setattr(ceilings, "_MATRIX", {"cpu": 32})
    real = ceilings._product
    monkeypatch.setattr(
        ceilings, "_product", lambda *of: seen.append(products.fp32_precision) or real(*of)
    )
    before = products.fp32_precision
    rows = [ceilings.measure_ceiling("cpu", name, budget_s=0.02) for name in ("tf32", "float32")]
    ceilings.measure_ceiling("cpu", "tf32", 0.02, sustained=True)
    assert seen == ["tf32", "ieee", "tf32"] and products.fp32_precision == before
    assert rows[0].scope == "tf32" and ceilings.operand_bytes("cpu", "fp8") == 16**2 * (3 + 4)


def test_what_is_sustained_is_the_second_half(monkeypatch):
    """A device that slows down after two of four seconds."""

    class Clock:
        method, at = "simulated", 0

        def time_block(self, phases, calls, inner):
            Clock.at += 1
            return [[1.0 if Clock.at <= 12 else 2.0] for _ in range(calls)]

        def resolution_ms(self):
            return 1e-6

    monkeypatch.setattr(ceilings, "_MATRIX", {"cpu": 100})
    monkeypatch.setattr(latency, "clock_for", lambda _: Clock())
    now = iter(x / 6 for x in range(1000))
    monkeypatch.setattr(
        ceilings, "time", type("time", (), {"perf_counter": staticmethod(lambda: next(now))})
    )
    row = ceilings.measure_ceiling("cpu", "float32", 4.0, sustained=True)
    assert row.estimate == pytest.approx(2 * 100**3 / 2e-3) and row.scope == "float32 sustained"
    assert row.message == "matrix product 100³, the second half of 4 s" and fp8.native("cpu")
