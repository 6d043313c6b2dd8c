"""The paper's evaluation, result by result, with every claim judged (paper, section 6; docs/evaluation.md)."""
