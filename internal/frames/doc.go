// Package frames compares the physical pages of an address range with those that it had earlier. Only
// tests use it, on Linux, with CAP_SYS_ADMIN: so they find that a registration is stale.
package frames
