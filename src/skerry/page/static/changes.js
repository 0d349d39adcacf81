// What changed of a record, put into it: the other half of page/changes.py, which says what a patch is.

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
