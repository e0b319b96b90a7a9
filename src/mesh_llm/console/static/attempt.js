// Something that the node may refuse: its sentence is shown where it was asked for.

import { say } from "./dom.js";

/** Whether it succeeded. */
export async function attempted(what, problem) {
  try {
    await what();
    problem.hidden = true;
    return true;
  } catch (error) {
    say(problem, [error.message, error.hint].filter(Boolean).join(": "));
    problem.hidden = false;
    return false;
  }
}
