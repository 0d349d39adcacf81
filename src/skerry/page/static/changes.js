// What changed of a record, put into it: the other half of page/changes.py, which says what a patch is.
// Names are keys of its tables, so none has a prototype: `__proto__` is a name there like any other.

export function parsed(text) {
  return JSON.parse(text, (_, value) =>
    value && typeof value === "object" && !Array.isArray(value) ? Object.assign(Object.create(null), value) : value,
  );
}

export function applied(before, patch) {
  if (Array.isArray(before)) {
    before.length = patch.from;
    for (const each of patch.then) before.push(each);
    return before;
  }
  for (const key of patch.gone ?? []) delete before[key];
  for (const [key, part] of Object.entries(patch.in ?? {})) before[key] = applied(before[key], part);
  for (const [key, value] of Object.entries(patch.set ?? {})) before[key] = value;
  return before;
}
