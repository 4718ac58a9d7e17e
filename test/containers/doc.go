// Package containers tests package san between network namespaces of one host, as containers in two pods
// have them: see docs/CONTAINERS.md. It makes the namespaces itself, as root, and starts its test binary
// in them.
package containers
