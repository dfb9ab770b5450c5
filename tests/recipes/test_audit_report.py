import pytest

from recipes.audit_report import audit_table, draw_audit


def row(step, kernels, version, *, tokens, mismatching, max_abs, left_out=0, first=None):
    return {
        "step": step,
        "kernels": kernels,
        "version": version,
        "tokens": tokens,
        "mismatching": mismatching,
        "max_abs": max_abs,
        "left_out": left_out,
        "first_difference": first,
    }


NATIVE = row(1, "native", 0, tokens=1000, mismatching=250, max_abs=1.5e-6, first="model.norm:rms_norm")
EXACT = row(2, "exact", 20, tokens=80, mismatching=0, max_abs=0.0, left_out=7)


def test_the_table_says_what_each_audit_found_and_what_it_means():
    lines = [line.split() for line in audit_table([NATIVE, EXACT]).splitlines()]
    assert ["native", "version", "0", "1000", "250", "25.0%", "1.5e-06", "0", "model.norm:rms_norm"] in lines
    assert ["exact", "version", "20", "80", "0", "0.0%", "0", "7", "-"] in lines
    said = audit_table([NATIVE, EXACT]).splitlines()[-2:]
    assert (
        said[0].strip()
        == "native kernels: 250 of 1000 tokens differ; execution mismatch, which no lag explains"
    )
    assert said[1].strip().startswith("exact kernels: 0 of 80 tokens differ; at equal weights")


def test_a_module_that_differs_is_no_agreement_even_if_no_token_does():
    hidden = {**EXACT, "first_difference": "lm_head"}
    assert "execution mismatch" in audit_table([hidden]).splitlines()[-1]


@pytest.mark.parametrize("rows", [[NATIVE], [NATIVE, EXACT], [EXACT] * 20])
def test_the_figure_is_drawn(tmp_path, rows):
    draw_audit(rows, tmp_path / "audit.png")
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")
