"""Which side a scenario is on follows from its name alone."""

import collections

from trace_jax.benchmarks.toolsandbox import splits


def test_the_list_has_the_base_scenarios_and_says_what_is_known_of_them():
    listed = splits.scenarios().values()
    assert len(listed) == 129
    assert sum(s.offline for s in listed) == 91
    assert sum(s.floor == 1.0 for s in listed) == 26 and {s.floor for s in listed} == {0.0, 1.0}
    assert collections.Counter(s.split for s in listed) == {"train": 79, "heldout": 50}
    assert collections.Counter(s.split for s in listed if s.offline) == {"train": 52, "heldout": 39}


def test_the_split_of_the_list_is_that_of_the_hash():
    assert all(splits.split_of(s.name) == s.split for s in splits.scenarios().values())


def test_all_variants_and_relatives_of_a_scenario_are_on_one_side():
    sides = collections.defaultdict(set)
    for name in splits.scenarios():
        for variant in splits.VARIANTS:
            assert splits.parts(name + variant) == (name, variant)
            sides[splits.family(name)].add(splits.split_of(name + variant))
    assert len(sides) == 43 and all(len(found) == 1 for found in sides.values())
    relatives = ["remove_contact_by_phone", "remove_contact_by_phone_no_search_contacts_insufficient_information_alt"]
    assert {splits.family(name) for name in relatives} == {"remove_contact_by_phone"}


def test_a_scenario_that_is_not_listed_has_a_side_and_is_not_taken_for_offline():
    assert splits.split_of("brew_coffee") == splits.split_of("brew_coffee_alt_all_tools")
    assert not splits.offline("brew_coffee") and splits.floor("brew_coffee") == 0.0
    assert splits.offline("wifi_off_all_tools") and splits.floor("find_current_city_insufficient_information") == 1.0


def test_every_tool_has_one_other_name():
    names = splits.tool_names()
    assert names["set_wifi_status"] == "setting_8" and len(set(names.values())) == len(names) == 34
