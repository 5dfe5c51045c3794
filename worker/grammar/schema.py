"""A JSON schema as the grammar compiler enforces it, and what of it the compiler would not. Pure.

`read` walks every place of a schema where keywords mean something (a property may be called `not`) and writes
the same schema in the compiler's terms: types said where keywords imply them, open objects said to be open,
patterns unanchored, references gathered under the root. Where the compiler ignores a keyword, or one beside
another, the keyword is reported and left out, which makes the grammar wider, never narrower. The walk has its
own stack: schemas nest as deep as JSON does, Python doesn't.

Narrower than the schema, though everything that comes out conforms to it: properties come in the order they
are declared in, keywords that speak about one type imply that type, strings with a length hold no escapes,
and bounded numbers no exponent.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote

import msgspec

from mlxpool.shared.api.read import quoted
from mlxpool.shared.text import cut
from mlxpool.worker.grammar import assertions, keywords, pattern
from mlxpool.worker.grammar.assertions import InvalidSchema
from mlxpool.worker.grammar.disjoint import are_disjoint, types_of_value
from mlxpool.worker.grammar.place import Place

# Names of the gathered definitions; no client's name can be in their way.
_DEFINITION = "d"

# A place in a list, as a pointer writes it; int() reads no more than some thousand digits.
_INDEX = re.compile("[0-9]{1,9}")


# More schemas than any in use, and few enough to be read in a second under Python's lock.
SCHEMAS_HIGH = 50_000

# Values and names that are compared for all proofs of oneOf together; references let few bytes ask for many.
_COMPARED_HIGH = 200_000


class Finding(msgspec.Struct, frozen=True):
    """A keyword that would not be enforced. place: the schema that holds it. why: where the keyword alone
    doesn't say it."""

    place: Place
    keyword: str
    why: str = ""

    @property
    def pointer(self) -> str:
        return str(self.place)

    def __str__(self) -> str:
        return f"{cut(self.keyword)}{self.place.at}{f' ({self.why})' if self.why else ''}"


class Reading(msgspec.Struct, frozen=True):
    """schema: in the compiler's terms, without what it would not enforce."""

    schema: Any
    unenforced: tuple[Finding, ...]


class _TooMuchError(Exception):
    """More of something than is looked at; the message says of what."""


def read(schema: Any) -> Reading:
    """The schema in the compiler's terms; one that is too large to be looked at counts as unenforced whole.
    Raises InvalidSchema."""
    if not keywords.is_schema(schema):
        raise InvalidSchema(f"a schema is an object, true or false, not {quoted(schema)}")
    try:
        return _Walk(schema).run()
    except _TooMuchError as err:
        return Reading({}, (Finding(Place(), str(err)),))


class _Walk:
    """One reading. Owns the worklist, the findings, the gathered definitions, and the count of its work."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._found: list[Finding] = []
        # Schemas still to be written: (container, key, schema, place).
        self._todo: list[tuple[Any, Any, Any, Place]] = []
        self._schemas = 0
        self._compared = 0
        self._definitions: dict[str, Any] = {}
        self._definition_of: dict[str, str] = {}

    def run(self) -> Reading:
        out: dict[str, Any] = {}
        self._todo.append((out, "root", self._root, Place()))
        while self._todo:
            container, key, schema, place = self._todo.pop()
            if isinstance(schema, dict):
                container[key] = self._write(schema, place)
            else:
                # The compiler takes no `true` in lists.
                container[key] = {} if schema and isinstance(container, list) else schema
        root = out["root"]
        if self._definitions:
            root = {**({} if isinstance(root, bool) else root), "$defs": self._definitions}
        elif root is True:
            root = {}
        return Reading(root, tuple(self._found))

    def _report(self, place: Place, keyword: str, why: str = "") -> None:
        self._found.append(Finding(place, keyword, why))

    def _later(self, container: Any, key: Any, schema: Any, place: Place) -> Any:
        """Room for a schema that is written when its turn comes."""
        self._schemas += 1
        if self._schemas > SCHEMAS_HIGH:
            raise _TooMuchError(f"more than {SCHEMAS_HIGH} schemas")
        self._todo.append((container, key, schema, place))
        return None

    def _compare(self, count: int) -> None:
        self._compared += count
        if self._compared > _COMPARED_HIGH:
            raise _TooMuchError(f"oneOf of more than {_COMPARED_HIGH} values to compare")

    def _named(self, schemas: dict[str, Any], place: Place) -> dict[str, Any]:
        # In their order, which is the order that the grammar asks for.
        out: dict[str, Any] = dict.fromkeys(schemas)
        for name, schema in schemas.items():
            self._later(out, name, schema, place.under(name))
        return out

    def _listed(self, schemas: list[Any], place: Place) -> list[Any]:
        out: list[Any] = [None] * len(schemas)
        for index, schema in enumerate(schemas):
            self._later(out, index, schema, place.under(str(index)))
        return out

    def _check(self, schema: dict[str, Any], place: Place) -> None:
        for keyword, value in schema.items():
            shape = keywords.SHAPES.get(keyword)
            if shape is not None and not shape[0](value):
                raise InvalidSchema(f"{keyword}{place.at} must be {shape[1]}, not {quoted(value)}")

    def _write(self, schema: dict[str, Any], place: Place) -> dict[str, Any]:
        self._check(schema, place)
        asserted = {}
        for keyword, value in schema.items():
            if keywords.is_annotation(keyword) or keywords.says_nothing(keyword, value):
                continue
            known = keyword in keywords.FAMILY_OF or keyword in keywords.DECIDERS or keyword == "type"
            # Vacuous without an `if`.
            if keyword in ("then", "else") and "if" not in schema:
                continue
            if known:
                asserted[keyword] = value
            else:
                self._report(place, keyword)
        if len(asserted.get("allOf", ())) > 1:
            self._report(place, "allOf", "of several schemas")
            del asserted["allOf"]
        decider = next((word for word in keywords.DECIDERS if word in asserted), None)
        if decider is None:
            return self._typed(asserted, place)
        if decider in ("const", "enum"):
            return self._values(asserted, place)
        rest = [word for word in asserted if word != decider]
        if decider in ("anyOf", "oneOf") and "type" in rest:
            pushed = _with_type(asserted[decider], asserted["type"])
            if pushed is not None:
                asserted[decider] = pushed
                rest.remove("type")
        if decider != "$ref" and any(word in rest for word in ("properties", "items")):
            # What says more stays.
            self._report(place, decider, f"beside {', '.join(rest)}")
            return self._typed(
                {word: asserted[word] for word in rest if word not in keywords.DECIDERS}, place
            )
        for word in rest:
            self._report(place, word, f"beside {decider}")
        if decider == "$ref":
            return {"$ref": self._reference(asserted["$ref"], place)}
        if decider == "allOf":
            return {"allOf": self._listed(asserted["allOf"], place.under("allOf"))}
        branches = asserted[decider]
        if decider == "oneOf" and not are_disjoint(
            [self._seen_through(branch) for branch in branches], self._compare
        ):
            self._report(place, "oneOf", "of schemas that one value may fit together")
        possible = [branch for branch in branches if branch is not False]
        if not possible:
            self._report(place, decider, "of nothing but false")
            return {}
        return {"anyOf": self._listed(possible, place.under(decider))}

    # References

    def _reference(self, ref: str, place: Place) -> str:
        known = self._definition_of.get(ref)
        if known is None:
            target = self._resolve(ref, place)
            if target is None:
                self._report(place, "$ref", "to another document or an anchor")
                target = True
            known = self._definition_of[ref] = f"{_DEFINITION}{len(self._definitions)}"
            self._definitions[known] = None
            self._later(self._definitions, known, target, Place(cut(unquote(ref[1:]))))
        return f"#/$defs/{known}"

    def _resolve(self, ref: str, place: Place) -> Any:
        """The schema that a reference names, None where it lies outside of this document's pointers."""
        if ref not in ("#", "") and not ref.startswith("#/"):
            return None
        found = self._root
        for token in unquote(ref[1:]).split("/")[1:]:
            name = token.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and name in found:
                found = found[name]
            elif isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
                found = found[int(name)]
            else:
                raise InvalidSchema(f"$ref{place.at}: {quoted(ref)} names nothing here")
        if not keywords.is_schema(found):
            raise InvalidSchema(f"$ref{place.at}: {quoted(ref)} names no schema")
        return found

    def _seen_through(self, schema: Any) -> Any:
        """A branch, or what it refers to."""
        if isinstance(schema, dict) and isinstance(schema.get("$ref"), str):
            return self._resolve(schema["$ref"], Place())
        return schema

    # Values

    def _values(self, asserted: dict[str, Any], place: Place) -> dict[str, Any]:
        decider = "const" if "const" in asserted else "enum"
        values = [asserted["const"]] if decider == "const" else asserted["enum"]
        for word in asserted:
            if word == decider or (word == "enum" and asserted["const"] in asserted["enum"]):
                continue
            if word == "type":
                names = _names(asserted["type"])
                fitting = [value for value in values if types_of_value(value) & names]
                if fitting:
                    values = fitting
                    continue
            self._report(place, word, f"beside {decider}")
        if any(isinstance(value, int) and abs(value) > keywords.INTEGER_HIGH for value in values):
            self._report(place, decider, "with a number of more than 64 bits")
            return {}
        return {"enum": list(values)}

    # Types and what they assert

    def _typed(self, asserted: dict[str, Any], place: Place) -> dict[str, Any]:
        if "type" in asserted:
            names = _names(asserted["type"])
        else:
            names = {keywords.FAMILY_OF[word] for word in asserted}
            if not names:
                return {}
        listed = sorted(names)
        out: dict[str, Any] = {"type": listed[0] if len(listed) == 1 else listed}
        own = {
            family: {
                word: value for word, value in asserted.items() if keywords.FAMILY_OF.get(word) == family
            }
            for family in ("string", "number", "array", "object")
        }

        def report(keyword: str, why: str) -> None:
            self._report(place, keyword, why)

        if "string" in names:
            out.update(assertions.string(own["string"], place, report))
        if names & {"number", "integer"}:
            out.update(assertions.number(own["number"], report, is_integer="number" not in names))
        if "array" in names:
            self._array(out, own["array"], place)
        if "object" in names:
            self._object(out, own["object"], place)
        return out

    def _array(self, out: dict[str, Any], given: dict[str, Any], place: Place) -> None:
        out.update({word: int(given[word]) for word in ("minItems", "maxItems") if word in given})
        first = given.get("prefixItems", [])
        if "maxItems" in out:
            first = first[: out["maxItems"]]
        if False in [item for item in first if isinstance(item, bool)]:
            self._report(place, "prefixItems", "with false")
            first = []
        if first:
            out["prefixItems"] = self._listed(first, place.under("prefixItems"))
        items = given.get("items", True)
        if isinstance(items, list):
            self._report(place, "items", "as a list; prefixItems works")
            items = True
        out["items"] = self._later(out, "items", items, place.under("items"))

    def _object(self, out: dict[str, Any], given: dict[str, Any], place: Place) -> None:
        declared: dict[str, Any] = dict(given.get("properties", {}))
        required = list(dict.fromkeys(given.get("required", [])))
        others = given.get("additionalProperties", True)
        names = self._names_schema(given, declared, required, place)
        by_pattern = self._by_pattern(given, declared, required, place)
        absent = dict.fromkeys(name for name, schema in declared.items() if schema is False).keys()
        if absent:
            if others is not False or not absent.isdisjoint(required):
                self._report(place, "properties", f"with false for {quoted(next(iter(absent)))}")
            declared = {name: schema for name, schema in declared.items() if schema is not False}
            required = [name for name in required if name not in absent]
        undeclared = [name for name in required if name not in declared]
        if undeclared and (others is False or "propertyNames" in given):
            self._report(place, "required", f"for {quoted(undeclared[0])}, which may not be there")
            required = [name for name in required if name in declared]
        elif undeclared:
            declared.update(dict.fromkeys(undeclared, others))
        if declared:
            out["properties"] = self._named(declared, place.under("properties"))
        if required:
            out["required"] = required
        if by_pattern is not None:
            key, schema = by_pattern
            out["patternProperties"] = self._named({key: schema}, place.under("patternProperties"))
            out["additionalProperties"] = False
        else:
            out["additionalProperties"] = self._later(
                out, "additionalProperties", others, place.under("additionalProperties")
            )
        if names is not None:
            out["propertyNames"] = names
        low = int(given.get("minProperties", 0))
        if low > len(required):
            # The same name twice is one property, and the grammar counts two.
            if others is not False or by_pattern is not None:
                self._report(place, "minProperties", "without additionalProperties: false")
            else:
                out["minProperties"] = low
        if "maxProperties" in given:
            out["maxProperties"] = int(given["maxProperties"])

    def _by_pattern(
        self, given: dict[str, Any], declared: dict[str, Any], required: list[str], place: Place
    ) -> tuple[str, Any] | None:
        """The one pattern of patternProperties that is enforced, in the compiler's terms, and its schema."""
        patterns = given.get("patternProperties")
        if not patterns:
            return None
        key, schema = next(iter(patterns.items()))
        fault = pattern.unsupported(key, in_json=True)
        if fault is not None and fault.invalid:
            raise InvalidSchema(
                f"patternProperties{place.at}: {quoted(key)} is no regular expression: {fault.what}"
            )
        if len(patterns) > 1 or declared or required or "propertyNames" in given:
            why = "of several patterns, or beside properties, required or propertyNames"
        elif given.get("additionalProperties", True) is not False:
            why = "without additionalProperties: false"
        elif fault is not None:
            why = fault.what
        elif schema is False:
            why = "with false"
        else:
            return pattern.whole(key), schema
        self._report(place, "patternProperties", why)
        return None

    def _names_schema(
        self, given: dict[str, Any], declared: dict[str, Any], required: list[str], place: Place
    ) -> dict[str, Any] | None:
        """A propertyNames schema in the compiler's terms, None where there is none or it isn't enforced."""
        names = given.get("propertyNames", True)
        if names is True or names == {}:
            return None
        inside = place.under("propertyNames")
        if isinstance(names, dict):
            self._check(names, inside)
        if declared or required or given.get("additionalProperties") is False:
            why = "beside properties, required or additionalProperties: false"
        elif names is False or any(word in names for word in ("$ref", "anyOf", "oneOf", "allOf")):
            why = "with anything but assertions about a string"
        elif "string" not in _names(names.get("type", "string")):
            why = "of another type than string"
        else:
            return self._write({**names, "type": "string"}, inside)
        self._report(place, "propertyNames", why)
        return None


def _names(value: str | list[str]) -> set[str]:
    """The types that a `type` names; a number may be an integer."""
    names = {value} if isinstance(value, str) else set(value)
    return names - {"integer"} if "number" in names else names


def _with_type(branches: list[Any], given: Any) -> list[Any] | None:
    """The branches with the type that is said beside them, None where a branch can't take it in."""
    names = _names(given)
    out = []
    for branch in branches:
        if not isinstance(branch, dict) or any(word in branch for word in keywords.DECIDERS):
            return None
        if "type" not in branch:
            out.append({**branch, "type": given})
        elif keywords.SHAPES["type"][0](branch["type"]) and _names(branch["type"]) <= names:
            out.append(branch)
        else:
            return None
    return out
