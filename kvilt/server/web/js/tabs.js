// Which tabs of this page are open, so that the KV handles of closed ones can be given back. Needs the Web Locks API,
// which browsers have on https and on this machine; elsewhere handles end when their time is over.

import { local, session } from './storage.js';

const TABS = 'tabs';
const lockOf = (id) => `kvilt.tab.${id}`;

export class Tabs {
  constructor() {
    this.id = session.get('tab') ?? crypto.randomUUID?.() ?? String(Math.random());
  }

  /** Hold this tab's place while it is open; a copy of another tab (its handles are not ours) becomes a new one. */
  async enter() {
    if (!navigator.locks) return false;
    let copied = false;
    if (!(await this.hold())) {
      this.id = crypto.randomUUID();
      copied = true;
      await this.hold();
    }
    session.set('tab', this.id);
    return copied;
  }

  hold() {
    return new Promise((entered) => {
      navigator.locks.request(lockOf(this.id), { ifAvailable: true }, (lock) => {
        entered(lock !== null);
        return lock === null ? null : new Promise(() => {}); // until the tab is closed
      });
    });
  }

  /** Write down which handles are this tab's. */
  note(handles) {
    const all = local.get(TABS, {});
    if (handles.length) all[this.id] = handles;
    else delete all[this.id];
    local.set(TABS, all);
  }

  /** The handles of tabs that are closed; they are forgotten here. */
  async left() {
    if (!navigator.locks) return [];
    const { held } = await navigator.locks.query();
    const open = new Set(held.map((lock) => lock.name));
    const all = local.get(TABS, {});
    const closed = Object.keys(all).filter((id) => id !== this.id && !open.has(lockOf(id)));
    const handles = closed.flatMap((id) => all[id]);
    for (const id of closed) delete all[id];
    local.set(TABS, all);
    return handles;
  }
}
