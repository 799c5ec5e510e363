// A part of TeX as MathML, which browsers draw themselves: fractions, roots, scripts, letters and operators.

const MATHML = 'http://www.w3.org/1998/Math/MathML';
const LETTERS = Object.fromEntries(('alpha α beta β gamma γ delta δ epsilon ε varepsilon ε zeta ζ eta η theta θ iota ι kappa κ lambda λ mu μ nu ν xi ξ pi π rho ρ sigma σ '
  + 'tau τ upsilon υ phi φ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω infty ∞ partial ∂ nabla ∇ ell ℓ hbar ℏ '
  + 'emptyset ∅ Re ℜ Im ℑ aleph ℵ').split(' ').reduce((pairs, word, i, all) => (i % 2 ? pairs : [...pairs, [word, all[i + 1]]]), []));
const SIGNS = Object.fromEntries(('times × cdot ⋅ div ÷ pm ± mp ∓ leq ≤ le ≤ geq ≥ ge ≥ neq ≠ ne ≠ approx ≈ equiv ≡ sim ∼ propto ∝ in ∈ notin ∉ subset ⊂ subseteq ⊆ supset ⊃ cup ∪ cap ∩ '
  + 'to → rightarrow → leftarrow ← Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ leftrightarrow ↔ mapsto ↦ forall ∀ exists ∃ neg ¬ land ∧ lor ∨ wedge ∧ vee ∨ sum ∑ prod ∏ int ∫ oint ∮ '
  + 'ldots … dots … cdots ⋯ vdots ⋮ circ ∘ bullet ∙ otimes ⊗ oplus ⊕ perp ⊥ parallel ∥ angle ∠ mid ∣ langle ⟨ rangle ⟩ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ prime ′ ast ∗ star ⋆')
  .split(' ').reduce((pairs, word, i, all) => (i % 2 ? pairs : [...pairs, [word, all[i + 1]]]), []));
const NAMES = new Set('sin cos tan log ln exp lim max min sup inf det dim ker arg gcd Pr'.split(' '));
const ACCENTS = { hat: '^', bar: '¯', vec: '→', tilde: '~', dot: '˙', overline: '¯' };
const DEEPEST = 24;
const LONGEST = 4000;

function node(tag, ...children) {
  const made = document.createElementNS(MATHML, tag);
  made.append(...children);
  return made;
}

/** A formula as an element, or null where it has more than this reads: then it stays text. */
export function formula(tex, display) {
  if (tex.length > LONGEST) return null;
  try {
    const reader = new Reader(tex.match(/\\[A-Za-z]+|\\.|\s+|./gsu) ?? []);
    const math = node('math', node('mrow', ...reader.row(0, [])));
    if (reader.at < reader.parts.length) return null;
    if (display) math.setAttribute('display', 'block');
    math.setAttribute('aria-label', tex);
    return math;
  } catch {
    return null;
  }
}

class Reader {
  constructor(parts) {
    this.parts = parts;
    this.at = 0;
  }

  peek() {
    while (this.parts[this.at] !== undefined && !this.parts[this.at].trim()) this.at += 1;
    return this.parts[this.at];
  }

  take() {
    const part = this.peek();
    if (part === undefined) throw new Error('the formula ends early');
    this.at += 1;
    return part;
  }

  row(depth, ends) {
    if (depth > DEEPEST) throw new Error('too deep');
    const nodes = [];
    for (let part = this.peek(); part !== undefined && !ends.includes(part); part = this.peek()) nodes.push(this.scripted(depth));
    return nodes;
  }

  scripted(depth) {
    const base = this.one(depth);
    const scripts = {};
    for (let part = this.peek(); part === '_' || part === '^'; part = this.peek()) {
      if (scripts[part]) throw new Error('two scripts');
      this.take();
      scripts[part] = this.group(depth);
    }
    if (scripts._ && scripts['^']) return node('msubsup', base, scripts._, scripts['^']);
    if (scripts._) return node('msub', base, scripts._);
    return scripts['^'] ? node('msup', base, scripts['^']) : base;
  }

  group(depth) {
    if (this.peek() !== '{') return this.one(depth);
    this.take();
    const row = node('mrow', ...this.row(depth + 1, ['}']));
    if (this.take() !== '}') throw new Error('no end');
    return row;
  }

  one(depth) {
    const part = this.peek();
    if (part === '{') return this.group(depth);
    this.take();
    if (part.startsWith('\\')) return this.command(part.slice(1), depth);
    if (/\p{N}/u.test(part)) return this.number(part);
    if (/\p{L}/u.test(part)) return node('mi', part);
    if ('}&#%$_^'.includes(part)) throw new Error('unexpected');
    return node('mo', part === '-' ? '−' : part);
  }

  number(first) {
    let digits = first;
    while (/^[\p{N}.]$/u.test(this.parts[this.at] ?? '')) digits += this.parts[this.at++];
    return node('mn', digits);
  }

  command(name, depth) {
    if (LETTERS[name]) return node('mi', LETTERS[name]);
    if (SIGNS[name]) return node('mo', SIGNS[name]);
    if (NAMES.has(name)) return node('mi', name);
    if (ACCENTS[name]) return node('mover', this.group(depth), node('mo', ACCENTS[name]));
    switch (name) {
      case 'frac': case 'dfrac': case 'tfrac':
        return node('mfrac', this.group(depth), this.group(depth));
      case 'sqrt':
        return this.root(depth);
      case 'text': case 'mathrm': case 'operatorname': case 'mathbf': case 'mathbb': case 'mathcal': case 'textbf':
        return node('mtext', this.words());
      case 'left': case 'right': case 'big': case 'Big': case 'displaystyle': case 'limits': case 'quad': case 'qquad': case ',': case ';': case ' ': case '!':
        return this.peek() === undefined || this.peek() === '.' ? this.nothing() : node('mrow');
      case '{': case '}': case '%': case '$': case '#': case '&': case '_': case '|':
        return node('mo', name === '|' ? '‖' : name);
      default:
        throw new Error(`unknown: ${name}`);
    }
  }

  nothing() {
    if (this.peek() === '.') this.take();
    return node('mrow');
  }

  root(depth) {
    if (this.peek() !== '[') return node('msqrt', this.group(depth));
    this.take();
    const index = node('mrow', ...this.row(depth + 1, [']']));
    this.take();
    return node('mroot', this.group(depth), index);
  }

  words() {
    if (this.take() !== '{') throw new Error('no group');
    let text = '';
    for (; this.parts[this.at] !== '}'; this.at += 1) {
      if (this.parts[this.at] === undefined || '{\\'.includes(this.parts[this.at][0])) throw new Error('no end');
      text += this.parts[this.at];
    }
    this.at += 1;
    return text;
  }
}
