import json
import math

import numpy as np
import pandas as pd

from kvdrift.words.json import json_safe, not_finite

VALUES = {"nan": math.nan, "inf": -np.inf, "n": np.int64(3), "yes": np.bool_(True), "row": np.array([1.5, np.nan])}


def test_what_json_has_no_number_for():
    assert json_safe(VALUES) == {"nan": "nan", "inf": "-inf", "n": 3, "yes": True, "row": [1.5, "nan"]}
    assert json_safe(VALUES, math.isnan) == {"nan": None, "inf": "-inf", "n": 3, "yes": True, "row": [1.5, None]}
    assert json_safe(VALUES, not_finite) == {"nan": None, "inf": None, "n": 3, "yes": True, "row": [1.5, None]}


def test_rows_of_a_table_survive_json():
    rows = pd.DataFrame({"n": [1, 2], "x": [0.5, np.nan], "s": ["a", None], "layer": [0, None]}).to_dict("records")
    safe = json_safe(rows, not_finite)
    assert json.loads(json.dumps(safe, allow_nan=False)) == safe
    assert safe[1] == {"n": 2, "x": None, "s": None, "layer": None}
    assert [type(value) for value in safe[0].values()] == [int, float, str, float]
