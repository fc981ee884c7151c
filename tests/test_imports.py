"""The house: imports follow the arrows of CONTRIBUTING.md, and no file imports, by way of others, itself.

Every import counts, also one inside a function or for types only: what a reader has to know before a file makes sense.
"""

import ast
import re
from itertools import pairwise
from pathlib import Path

import networkx as nx
import pytest

import kvdrift

ROOT = Path(kvdrift.__file__).parent
FLOORS = (
    ("errors", "bits", "demo_prompts", "version", "words"),
    ("shapes", "files", "markup", "plain", "renamed", "fingerprint", "statistics"),
    ("provenance", "settings", "result"),
    ("backends",),
    ("models",),
    ("tracing",),
    ("nnsight", "controls"),
    ("paths",),
    ("runs",),
    ("drift",),
    ("patching", "ladder", "evaluation", "diagnosis"),
    ("experiments", "testing"),
    ("summaries",),
    ("views",),
    ("report",),
    ("cli",),
    ("__main__",),
)
"""Rooms and files at the foot, lowest floor first; one imports from floors below its own, and from itself."""


def files() -> dict[str, Path]:
    """Dotted name → file; a room's ``__init__`` goes by the room's name."""
    named = {".".join(path.relative_to(ROOT.parent).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


def graph() -> nx.DiGraph:
    """An edge from each file of the package to each file that it imports."""
    known = files()
    edges = nx.DiGraph()
    edges.add_nodes_from(known)
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                asked = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                asked = [alias.name for alias in node.names]
            else:
                continue
            for target in asked:
                while target and target not in known:
                    target = target.rpartition(".")[0]
                if target and target != name:
                    edges.add_edge(name, target)
    return edges


@pytest.fixture(scope="module")
def house() -> nx.DiGraph:
    return graph().subgraph(set(files()) - {"kvdrift"})


def room(name: str) -> str:
    return name.split(".")[1]


def test_every_file_has_a_floor(house):
    floors = [one for floor in FLOORS for one in floor]
    assert {room(name) for name in house} <= set(floors)
    assert len(floors) == len(set(floors))


def test_no_file_imports_itself_by_way_of_others(house):
    circles = [sorted(circle) for circle in nx.strongly_connected_components(house) if len(circle) > 1]
    assert not circles, "\n".join(map(str, circles))


def test_imports_follow_the_arrows(house):
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    against = [
        f"{one} imports {other}"
        for one, other in house.edges
        if room(one) != room(other) and floor[room(one)] <= floor[room(other)]
    ]
    assert not against, "\n".join(sorted(against))


def test_nothing_imports_the_front_door(house):
    """``kvdrift/__init__.py`` names what users see; inside, each thing comes from where it lives."""
    assert not list(graph().predecessors("kvdrift"))


def test_the_floors_are_those_of_the_docs():
    """The arrows drawn in CONTRIBUTING.md go down."""
    text = (ROOT.parent / "CONTRIBUTING.md").read_text()
    drawn = text.split("flowchart")[1].split("```")[0]
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    arrows = 0
    for line in drawn.splitlines():
        ends = [[name.strip() for name in side.split("&")] for side in line.split("-->")]
        for above, below in pairwise(ends):
            for high in above:
                for low in below:
                    arrows += 1
                    assert floor[high] > floor[low], line
    assert arrows > 10


@pytest.mark.parametrize("name", sorted(path.parent.name for path in ROOT.glob("*/__init__.py")))
def test_every_room_says_what_lives_there_and_what_may_not(name):
    said = ast.get_docstring(ast.parse((ROOT / name / "__init__.py").read_text()))
    assert said, f"{name} says nothing"
    words = set(re.findall(r"[a-z]+", said.lower()))
    assert words & {"never", "not", "no", "none", "nothing"}, f"{name}: {said!r} names nothing that may not"
