// Colours for code: comments, strings, numbers and keywords, found by one expression for each kind of language.

import { el } from './dom.js';

const HASH = /^(py|python|sh|bash|shell|zsh|ruby|rb|yaml|yml|toml|r|perl|make|dockerfile)$/;
const DASH = /^(sql|lua|haskell|hs|ada)$/;
const KEYWORDS = new Set(('and as async await bool break case catch char class const continue def default del do double elif else enum except export extends '
  + 'extern false finally float fn for from func function global go if impl import in int interface is lambda let long match mod move mut namespace new nil '
  + 'none not null or package pass private protected public raise ref return select self short static string struct super switch template this throw trait true try '
  + 'type typedef typeof union unsafe use using var void where while with yield None True False SELECT FROM WHERE INSERT INTO UPDATE DELETE JOIN ON GROUP BY ORDER '
  + 'LIMIT CREATE TABLE VALUES SET AND OR NOT NULL echo then fi done esac').split(' '));
const LONGEST = 20000; // characters; longer code stays plain, so that a page never waits for colours

function expression(language) {
  const comment = HASH.test(language) ? '#[^\\n]*' : DASH.test(language) ? '--[^\\n]*' : '\\/\\/[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)';
  const string = '"""[\\s\\S]*?(?:"""|$)|"(?:[^"\\\\\\n]|\\\\.)*"?|\'(?:[^\'\\\\\\n]|\\\\.)*\'?|`(?:[^`\\\\]|\\\\.)*`?';
  return new RegExp(`(${comment})|(${string})|(\\b\\d[\\w.]*)|([A-Za-z_]\\w*)`, 'g');
}

/** The nodes of code in a language. */
export function highlighted(text, language) {
  if (!language || language === 'text' || text.length > LONGEST) return [text];
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(expression(language.toLowerCase()))) {
    const [whole, comment, string, number, word] = found;
    const kind = comment ? 'comment' : string ? 'string' : number ? 'number' : KEYWORDS.has(word) ? 'keyword' : null;
    if (!kind) continue;
    if (found.index > at) nodes.push(text.slice(at, found.index));
    nodes.push(el('span', { class: `tok-${kind}` }, whole));
    at = found.index + whole.length;
  }
  nodes.push(text.slice(at));
  return nodes;
}
