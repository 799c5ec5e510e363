// The lines of a Markdown table, read into cells.

const RULE = /^\s*\|?\s*:?-{1,}:?\s*(\|\s*:?-{1,}:?\s*)*\|?\s*$/;
const MOST = 24; // columns

/** Whether a table begins at a line: a head with bars, and a rule with as many columns. */
export function isTable(lines, at) {
  const [head, rule] = [lines[at], lines[at + 1] ?? ''];
  return head.includes('|') && rule.includes('-') && RULE.test(rule) && cells(head).length === cells(rule).length && cells(rule).length <= MOST;
}

/** The texts of a row. A bar behind a backslash, or inside code, is no edge. */
export function cells(line) {
  const found = [''];
  let code = false;
  const text = line.trim().replace(/^\|/, '').replace(/(?<!\\)\|$/, '');
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === '`') code = !code;
    if (text[at] === '\\' && text[at + 1] === '|') found[found.length - 1] += text[(at += 1)];
    else if (text[at] === '|' && !code) found.push('');
    else found[found.length - 1] += text[at];
  }
  return found.map((cell) => cell.trim());
}

/** How each column is aligned: '', 'start', 'middle' or 'end'. */
export function alignments(rule) {
  return cells(rule).map((cell) => {
    const [left, right] = [cell.startsWith(':'), cell.endsWith(':')];
    return left && right ? 'middle' : right ? 'end' : left ? 'start' : '';
  });
}
