// Package api checks that programs which were written for the last version of this module
// still compile: what that version had (its list is the newest v*.txt here) is still there.
// What has been added needs no entry until the next version. docs/COMPATIBILITY.md has what
// is promised.
package api
