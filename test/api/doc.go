// Package api checks that programs that were written for the last version of this module still compile:
// everything in that version's list, which is the newest v*.txt here, must still exist. Additions need
// no entry until the next version. docs/COMPATIBILITY.md tells what is promised.
package api
