// Holds the turns, and asks for one answer at a time. Knows the page by the views of the turns and a few callbacks.

import { announce, announceNow } from "./announcer.js";
import { Answer } from "./answer.js";
import { streamAnswer } from "./api.js";
import { requestOf } from "./request.js";
import { TurnView } from "./turn_view.js";

export class Conversation {
  turns = [];
  #running = null;

  /** `page`: `model()` and `settings()`, each null where there is none; `asked()` when a prompt is sent;
   *  `changed()`; `snippet(request, kind)`. */
  constructor(list, page) {
    this.list = list;
    this.page = page;
  }

  get isRunning() {
    return this.#running !== null;
  }

  /** Asks a new prompt. False if it cannot. */
  send(prompt) {
    if (this.isRunning || !prompt.trim()) return false;
    const turn = { prompt, answer: null };
    return this.#ask(turn, () => {
      turn.view = new TurnView(turn, {
        edit: (_, text) => this.#edit(turn, text),
        regenerate: () => this.#ask(turn, () => this.#keepUpTo(turn)),
        snippet: (_, kind) => this.page.snippet(turn.request, kind),
      });
      this.turns.push(turn);
      this.list.append(turn.view.root);
    });
  }

  stop() {
    this.#running?.abort();
  }

  clear() {
    this.stop();
    this.turns = [];
    this.list.replaceChildren();
    this.page.changed();
  }

  #edit(turn, prompt) {
    return this.#ask(turn, () => {
      turn.prompt = prompt;
      this.#keepUpTo(turn);
    });
  }

  /** Later turns answered what is not said any more. */
  #keepUpTo(turn) {
    for (const later of this.turns.splice(this.turns.indexOf(turn) + 1)) later.view.root.remove();
  }

  /** `prepare`: what is done first, if the prompt can be asked at all. */
  #ask(turn, prepare) {
    const [model, settings] = [this.page.model(), this.page.settings()];
    if (this.isRunning || !model || !settings) return false;
    prepare();
    turn.answer = new Answer(performance.now());
    turn.request = requestOf(model, this.turns, settings);
    turn.view.reset();
    this.#running = new AbortController();
    this.page.asked();
    this.#receive(turn, this.#running);
    return true;
  }

  async #receive(turn, control) {
    const { answer, view } = turn;
    const end = (how) => answer.end(how);
    this.#show(turn);
    announceNow("The answer begins.");
    try {
      for await (const chunk of streamAnswer(turn.request, control.signal)) {
        const before = answer.text.length;
        answer.add(chunk, performance.now());
        announce(answer.text.slice(before));
        this.#showSoon(turn);
      }
      end({});
    } catch (error) {
      end(control.signal.aborted ? { stopped: true } : { error });
    }
    if (this.#running === control) this.#running = null;
    if (view.root.isConnected) this.#show(turn);
    announceNow(answer.error ? "" : answer.stopped ? "Stopped." : "The answer is complete.");
  }

  /** At most once a frame. */
  #showSoon(turn) {
    turn.frame ??= requestAnimationFrame(() => {
      turn.frame = null;
      this.#show(turn);
    });
  }

  #show(turn) {
    turn.view.update();
    this.page.changed();
  }
}
