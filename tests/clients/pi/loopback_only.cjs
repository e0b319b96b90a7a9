// Loaded into pi before its own code: refuses and records whatever would leave this machine.
"use strict";

const dns = require("node:dns");
const fs = require("node:fs");
const net = require("node:net");

const HERE = new Set(["localhost", "127.0.0.1", "::1"]);

function check(host) {
  if (host !== undefined && !HERE.has(host)) {
    fs.appendFileSync(process.env.CALLED_OUT, `${host}\n`);
    throw new Error(`a test may not call ${host}`);
  }
}

const connect = net.Socket.prototype.connect;
net.Socket.prototype.connect = function (...given) {
  // Either what the caller wrote, or what Node has made of it: a list with the options in front.
  const [first] = Array.isArray(given[0]) ? given[0] : given;
  check(typeof first === "object" && first !== null ? first.host : given[1]);
  return connect.apply(this, given);
};

const lookup = dns.lookup;
dns.lookup = function (host, ...rest) {
  check(host);
  return lookup.call(this, host, ...rest);
};
