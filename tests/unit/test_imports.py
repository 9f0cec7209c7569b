"""How files import each other."""

from graphlib import TopologicalSorter

import grimp


def test_no_file_imports_another_in_a_circle_not_even_inside_a_function() -> None:
    graph = grimp.build_graph("flows", "tasks", "rlhf_core", "infra", cache_dir=None)
    TopologicalSorter({name: graph.find_modules_directly_imported_by(name) for name in graph.modules}).prepare()
