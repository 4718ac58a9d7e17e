module github.com/sanconn/san/test/interop

go 1.26.0

require (
	connectrpc.com/connect v1.21.1
	github.com/coder/websocket v1.8.15
	github.com/gorilla/websocket v1.5.3
	github.com/hashicorp/yamux v0.1.2
	github.com/sanconn/san v0.0.0
	github.com/valyala/fasthttp v1.78.0
	github.com/xtaci/smux v1.5.58
	golang.org/x/crypto v0.58.0
	google.golang.org/protobuf v1.36.12
	storj.io/drpc v1.0.0
)

require (
	github.com/Mellanox/rdmamap v1.1.0 // indirect
	github.com/klauspost/compress v1.20.3 // indirect
	github.com/molecule-man/go-brrr v1.3.1 // indirect
	github.com/valyala/bytebufferpool v1.0.0 // indirect
	github.com/vishvananda/netlink v1.1.0 // indirect
	github.com/vishvananda/netns v0.0.0-20191106174202-0a2b9b5464df // indirect
	github.com/zeebo/errs v1.2.2 // indirect
	golang.org/x/sys v0.49.0 // indirect
)

replace github.com/sanconn/san => ../..
