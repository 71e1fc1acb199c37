"""One sentence of what jsonargparse says in twenty lines, where a value is of a wrong type or names no class."""

import re

_CLASS = "dot import path string: "
_UNKNOWN = r"class_path '(?P<kind>[^']+)':\s+(?:Option '|unrecognized arguments: --)(?P<name>[^'=\s]+)"
_UNKNOWN_TO_A_MAKER = r"Option '(?P<name>[^']+)' is not accepted\. Got value: Namespace\(class_path='(?P<kind>[^']+)'"
_TYPES = {
    "<class 'NoneType'>": "null",
    "<class 'dict'>": "a mapping",
    "<class 'list'>": "a list",
    "<class 'tuple'>": "a list",
}


def in_one_sentence(message: str) -> str:
    """The option, what it takes and what was given; the message as it is where that cannot be told."""
    if missing := re.match(r"the following arguments are required: (\w+)\.(data|model)", message):
        return f"{missing[1]} needs a configuration, as swbn {missing[1]} --config configs/quickstart.yaml."
    if loose := re.fullmatch(r"unrecognized arguments: (\S+\.ya?ml)", message):
        return f"a configuration is given as --config {loose[1]}."
    key, block = _innermost(message)
    block = re.sub(r"Group '([^']+)' does not accept option '", r"Option '\1.", block)
    if unknown := re.search(_UNKNOWN, block) or re.search(_UNKNOWN_TO_A_MAKER, block):
        return f"{key}: {unknown['kind']} has no option {unknown['name']!r}."
    expected = list(dict.fromkeys(re.findall(r"Expected an? (.+?)(?:\. Got value: .*)?$", block, re.MULTILINE)))
    given = re.search(r"(?:Given|Got) value: (.*?)(?:\. Got value: .*)?$", block, re.MULTILINE)
    taken = [kind for kind in expected if not kind.startswith(("path but", _CLASS))]
    if given and taken and taken != ["<class 'NoneType'>"]:
        return f"{key}: expected {' or '.join(map(_type, taken))}, got {given[1]!r}."
    if named := [kind.removeprefix(_CLASS) for kind in expected if kind.startswith(_CLASS)]:
        return f"{key}: no class {named[0]!r} is known; give its import path, as package.module.Class."
    return message if "\n" in message else re.sub(r'^Parser key "([^"]+)":', r"\1:", message)


def _innermost(message: str) -> tuple[str, str]:
    """The name of the option that is wrong, by all parsers around it, and what is said of it."""
    found: list[tuple[int, str]] = []
    block: list[str] = []
    inside = True
    for line in message.splitlines():
        indent = len(line) - len(line.lstrip())
        keys = re.findall(r'Parser key "([^"]+)":', line)
        if keys:
            found = [(deep, key) for deep, key in found if deep < indent] + [(indent, key) for key in keys]
            block, inside = [line.rpartition('":')[2]], True
        elif found and line.strip() and indent <= found[-1][0]:
            inside = False
        elif inside:
            block.append(line)
    return ".".join(key for _, key in found), "\n".join(block)


def _type(text: str) -> str:
    if literal := re.fullmatch(r"typing\.Literal\[(.*)\]", text):
        return f"one of {literal[1]}"
    plain = re.fullmatch(r"<class '([\w.]+)'>", text)
    return _TYPES.get(text) or (plain[1] if plain else text)
