// Package siege tests a host on which another user attacks. The victim, which is a server, the attacker
// and a bystander are processes of a user each, in a network namespace that the test makes. While the
// attack goes on, the bystander counts and times its dials and echoes, and /proc shows what the victim
// uses. The tests assert what docs/SECURITY.md says about a peer of another user.
//
// The attackers have their own implementation of shared memory's protocol (internal/rawshm), which was
// written from docs/PROTOCOL.md: so the tests also show that the document is correct and complete.
//
// The tests need root, and a machine that does nothing else meanwhile: see testenv.NeedSiege.
package siege
