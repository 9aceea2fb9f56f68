"""Notebooks made on the spot, one a behaviour."""

from __future__ import annotations

import json


def notebook(*cells: str, tags: tuple[str, ...] = ()) -> str:
    """The JSON of a notebook of code cells; the first is its parameters cell."""
    made = [
        {
            "cell_type": "code",
            "id": f"c{number}",
            "metadata": {"tags": ["parameters"]} if number == 0 else {},
            "source": source,
            "outputs": [],
            "execution_count": None,
        }
        for number, source in enumerate(cells)
    ]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return json.dumps({"cells": made, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})
