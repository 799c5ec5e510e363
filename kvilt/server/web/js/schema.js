// Whether a value fits a JSON schema: the keywords that users write most. The server's grammar enforces the rest.

const TYPES = {
  string: (value) => typeof value === 'string',
  number: (value) => typeof value === 'number',
  integer: (value) => Number.isInteger(value),
  boolean: (value) => typeof value === 'boolean',
  null: (value) => value === null,
  array: Array.isArray,
  object: (value) => typeof value === 'object' && value !== null && !Array.isArray(value),
};

/** What is wrong first, with its place; null where the value fits. */
export function misfit(value, schema, place = 'answer') {
  if (schema === true || schema === null || typeof schema !== 'object') return null;
  const types = [schema.type ?? []].flat();
  if (types.length && !types.some((type) => TYPES[type]?.(value))) return `${place} is no ${types.join(' or ')}`;
  if (schema.enum && !schema.enum.some((one) => JSON.stringify(one) === JSON.stringify(value))) return `${place} is none of the values`;
  if ('const' in schema && JSON.stringify(schema.const) !== JSON.stringify(value)) return `${place} is another value`;
  if (TYPES.object(value)) return objectMisfit(value, schema, place);
  if (Array.isArray(value) && schema.items) return value.map((one, i) => misfit(one, schema.items, `${place}[${i}]`)).find(Boolean) ?? null;
  return null;
}

function objectMisfit(value, schema, place) {
  const missing = (schema.required ?? []).find((name) => !(name in value));
  if (missing !== undefined) return `${place}.${missing} is missing`;
  const known = schema.properties ?? {};
  const more = schema.additionalProperties === false ? Object.keys(value).find((name) => !(name in known)) : undefined;
  if (more !== undefined) return `${place}.${more} is not in the schema`;
  return Object.entries(known).map(([name, inner]) => (name in value ? misfit(value[name], inner, `${place}.${name}`) : null)).find(Boolean) ?? null;
}

/** How an answer stands to a schema while it is written. */
export function schemaState(text, schema, ended) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    return ended ? { fits: false, says: 'no JSON' } : { fits: null, says: 'JSON, unfinished' };
  }
  const wrong = misfit(value, schema);
  return wrong ? { fits: false, says: wrong } : { fits: true, says: 'fits the schema' };
}

/** A text of the settings as JSON: `{value}` or `{error}`; an empty one is neither. */
export function readJson(text) {
  if (!text.trim()) return {};
  try {
    return { value: JSON.parse(text) };
  } catch (error) {
    return { error: error.message };
  }
}
