// Package siege has the tests of a host on which another user attacks: a victim that
// serves, an attacker and a bystander, each a process of a user of its own, in a network
// namespace that the test makes. While the attack goes on, the bystander's dials and echoes
// are counted and timed, and what the victim has in use is read from /proc. What
// docs/SECURITY.md says about a peer of another user is asserted here.
//
// The attackers speak shared memory's protocol by themselves (internal/rawshm), written from
// docs/PROTOCOL.md: so the tests show that it is true and complete.
//
// The tests need root, and a machine that does nothing else meanwhile: see testenv.NeedSiege.
package siege
