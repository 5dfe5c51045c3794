// The one place that knows where the vendored libraries lie; every other module imports from here.

import { Component, Fragment, createRef, h, render } from "../vendor/preact-11.2.0/preact.js";
import htm from "../vendor/htm-3.1.1/htm.js";

export { Component, Fragment, createRef, h, render };
export { useCallback, useEffect, useId, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact-11.2.0/hooks.js";
export { batch, computed, effect, signal, untracked, useComputed, useSignal, useSignalEffect } from "../vendor/preact-signals-2.11.4/signals.js";

/** A component that is drawn again only when one of its properties is another value. */
export function memo(view) {
  return class extends Component {
    shouldComponentUpdate(next) {
      return Object.keys({ ...this.props, ...next }).some((name) => this.props[name] !== next[name]);
    }

    render(props) {
      return view(props);
    }
  };
}

/** Templates as tagged strings. Every `${value}` becomes a text node or a property, never markup. */
export const html = htm.bind(h);
