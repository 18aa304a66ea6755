"""From an error of the parser to the way out, or to the options and class names that are spelled nearly the same."""

from __future__ import annotations

import difflib
import inspect
import re
from argparse import ArgumentParser, _SubParsersAction

# What a message quotes from the input: 'quoted', --option, a dotted or snake_case name, a ClassName.
_QUOTED = re.compile(r"'([\w.]+)'|--([\w.]+)|\b(\w+[._]\w[\w.]*)|\b([A-Z]\w*[A-Z]\w*)")
_FORMATS_ALONE = (
    "A file of number formats, such as configs/recipes/hopper.yaml, is no --config: give it as --recipe FILE, behind "
    "--config configs/grpo_fp4.yaml or a config of yours."
)
_WAYS_OUT = {  # of errors whose own words name neither the mistake nor what to do
    r'Parser key "trainer":\s+Unable to load config': "trainer holds the settings of Lightning's Trainer; whether the "
    f"trainer rounds is recipe.trainer. {_FORMATS_ALONE}",
    r"does not accept option '(weights|activations|kv_cache|guidance|kv_rotation|bf16_layers)'": _FORMATS_ALONE,
    r"arguments are required: .*(model\.path|data\.task)": "A config or an option has to name them. A file of "
    "configs/recipes changes a config and comes behind one: --config configs/grpo_fp4.yaml --config RECIPE.yaml.",
}
# What the parser says of a value that may also be null: two errors of which the second says nothing.
_OR_NULL = re.compile(
    r"Does not validate against any of the Union subtypes\s+Subtypes: \[[^\]]*NoneType'>\]\s+Errors:\s+- (.*?)\s+"
    r"- Expected a <class 'NoneType'>.*",
    re.DOTALL,
)
_OF_A_CLASS = re.compile(r"Problem with given class_path '[\w.]+':\s+")


def plain(message: str) -> str:
    """The one reason inside a message about a value that may also be null; any other message as it is."""
    return _OF_A_CLASS.sub("", _OR_NULL.sub(r"\1", message)) if _OR_NULL.search(message) else message


def way_out(message: str) -> str | None:
    """What to do about an error of the parser, where that is known."""
    return next((text for pattern, text in _WAYS_OUT.items() if re.search(pattern, message)), None)


def vocabulary(parser: ArgumentParser, components: tuple[type, ...]) -> set[str]:
    """All option names of a parser and of its subcommands, and class and argument names of the components.

    Args:
        parser: the parser that failed.
        components: base classes whose subclasses can be named in a config.
    """
    known: set[str] = set()
    parsers = [parser]
    while parsers:
        for action in parsers.pop()._actions:
            known |= {action.dest, *(option.lstrip("-") for option in action.option_strings)}
            if isinstance(action, _SubParsersAction):
                parsers += action.choices.values()
    queue = list(components)
    while queue:
        cls = queue.pop()
        queue += cls.__subclasses__()
        known.add(cls.__name__)
        known |= set(inspect.signature(cls).parameters)
    return {name for name in known if len(name) > 2}


def did_you_mean(message: str, known: set[str]) -> list[str]:
    """Known names close to an unknown word of `message`, best first; empty if nothing is close.

    A dotted option is also compared by its last part, so that `recipe.kv_cash` finds `recipe.kv_cache`.
    """
    found: list[str] = []
    for word in ("".join(groups) for groups in _QUOTED.findall(message)):
        if word in known or len(word) < 4:
            continue
        found += difflib.get_close_matches(word, known, n=2, cutoff=0.8)
    return list(dict.fromkeys(found))[:4]
