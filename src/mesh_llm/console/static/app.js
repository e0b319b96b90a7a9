// The page: each part looks after its own section, and all are fed by one stream.

import * as agents from "./agents.js";
import * as bar from "./bar.js";
import { follow } from "./feed.js";
import * as guests from "./guests.js";
import * as head from "./head.js";
import * as invite from "./invite.js";
import * as journal from "./journal.js";
import * as model from "./model.js";
import * as notice from "./notice.js";
import * as pair from "./pair.js";
import * as plots from "./plots.js";
import * as waterfall from "./waterfall.js";

for (const part of [head, bar, model, waterfall, plots, journal, notice, agents, invite, pair, guests]) part.start();
follow();
