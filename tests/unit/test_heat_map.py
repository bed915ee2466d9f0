import xml.etree.ElementTree as ET

from coterie.telemetry.heat_map import heat_map

NAMES = ["cos/cos", "thirdparty/directory"]


def test_a_heat_map_shows_every_number_and_darkens_with_it() -> None:
    cells = {("a<b", NAMES[0]): 0.5, ("a<b", NAMES[1]): 50.0, ("c", NAMES[0]): 5.0}
    root = ET.fromstring(heat_map("Round trip", ["a<b", "c"], NAMES, cells, "ms"))
    texts = [one.text for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a<b", "c", "0.5 ms", "50 ms", "5 ms"} <= set(texts)
    boxes = list(root.iter("{http://www.w3.org/2000/svg}rect"))[1:]
    assert len(boxes) == 4
    red = [int(one.get("fill")[1:3], 16) for one in boxes[:3]]  # a<b at both, c at the first
    assert red[0] > red[2] > red[1]


def test_a_heat_map_without_a_number_is_still_an_image() -> None:
    ET.fromstring(heat_map("Nothing", [], [], {}, "ms"))
    ET.fromstring(heat_map("Zero", ["a"], ["b"], {("a", "b"): 0.0}, "ms"))
