module github.com/sanconn/san/cmd/sanproxy

go 1.25.0

require (
	github.com/pires/go-proxyproto v0.15.0
	github.com/sanconn/san v0.0.0
	golang.org/x/sys v0.46.0
)

require (
	github.com/Mellanox/rdmamap v1.1.0 // indirect
	github.com/vishvananda/netlink v1.3.1 // indirect
	github.com/vishvananda/netns v0.0.5 // indirect
)

replace github.com/sanconn/san => ../..
