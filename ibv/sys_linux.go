package ibv

// The only file with cgo. The rule that makes it right: C gets integers, and
// pointers to memory without pointers, and keeps none of them after the call.

/*
// Of C libraries that keep dlopen apart (glibc before 2.34), though the reference to it
// is weak.
#cgo LDFLAGS: -Wl,--no-as-needed -ldl
#include <stdlib.h>
#include "shim_linux.h"

// Nothing in the shim keeps a pointer or calls back into Go: these two let a call
// pass Go memory without moving it to the heap, for two calls of the runtime more,
// which watch for a callback. So the hottest calls have neither, and pass what lives
// there anyway.
#cgo noescape san_get_cq_events
#cgo nocallback san_get_cq_events
*/
import "C"

import (
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"unsafe"
)

const errnoAgain = int(syscall.EAGAIN)

// The Go twins of the shim's structs have the same size; that their fields are
// in the same order can be read, and is tested on the wire.
var (
	_ [unsafe.Sizeof(SGE{})]byte    = [C.sizeof_struct_san_sge]byte{}
	_ [unsafe.Sizeof(SendWR{})]byte = [C.sizeof_struct_san_send_wr]byte{}
	_ [unsafe.Sizeof(RecvWR{})]byte = [C.sizeof_struct_san_recv_wr]byte{}
	_ [unsafe.Sizeof(WC{})]byte     = [C.sizeof_struct_san_wc]byte{}
	_ [unsafe.Sizeof(QPAttr{})]byte = [C.sizeof_struct_san_qp_attr]byte{}
	_ [unsafe.Sizeof(QPCap{})]byte  = [C.sizeof_struct_san_qp_cap]byte{}
)

// sysLoad returns why there are no libraries; the errno: why that is not known.
func sysLoad() (why string, errno int) {
	fd, err := syscall.Open("/", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err == syscall.EMFILE || err == syscall.ENFILE { // the loader would not find them, either
		return "", int(err.(syscall.Errno))
	}
	syscall.Close(fd) // or -1
	if why := C.san_load(); why != nil {
		return C.GoString(why), 0
	}
	return "", 0
}

func sysForkSafe() bool { return C.san_fork_safe() != 0 }

// ---- hot calls ----

func sysPollCQ(cq cObject, wcs []WC, times int) int {
	return int(C.san_poll_cq(C.san_h(cq), (*C.struct_san_wc)(unsafe.Pointer(unsafe.SliceData(wcs))), C.int(len(wcs)), C.int(times)))
}

func sysPostSend(qp cObject, wrs []SendWR) (int, int) {
	r := C.san_post_send(C.san_h(qp), (*C.struct_san_send_wr)(unsafe.Pointer(unsafe.SliceData(wrs))), C.int(len(wrs)))
	return int(r.n), int(r.error)
}

func sysPostRecv(qp cObject, wrs []RecvWR) (int, int) {
	r := C.san_post_recv(C.san_h(qp), (*C.struct_san_recv_wr)(unsafe.Pointer(unsafe.SliceData(wrs))), C.int(len(wrs)))
	return int(r.n), int(r.error)
}

func sysGetCQEvents(ch cObject, tokens []uint64) (int, int) {
	var n C.int
	errno := C.san_get_cq_events(C.san_h(ch), (*C.uint64_t)(unsafe.Pointer(&tokens[0])), C.int(len(tokens)), &n)
	return int(n), int(errno)
}

func sysReqNotify(cq cObject) int { return int(C.san_req_notify(C.san_h(cq))) }

// ---- devices ----

func goDevice(d *C.struct_san_device) Device {
	return Device{
		Name: C.GoString(&d.name[0]), Sysfs: C.GoString(&d.sysfs[0]), GUID: uint64(d.guid),
		Transport: Transport(d.transport), Index: int(d.index),
	}
}

func sysDevices(most int) ([]Device, int) {
	raw := make([]C.struct_san_device, most)
	var n C.int
	errno := C.san_devices(&raw[0], C.int(most), &n)
	list := make([]Device, min(int(n), most))
	for i := range list {
		list[i] = goDevice(&raw[i])
	}
	return list, int(errno)
}

func sysOpen(name string) (cObject, int) {
	s := C.CString(name)
	defer C.free(unsafe.Pointer(s))
	var h C.san_h
	errno := C.san_open(s, &h)
	return cObject(h), int(errno)
}

func sysClose(ctx cObject) int { return int(C.san_close(C.san_h(ctx))) }

func sysContext(ctx cObject) (Device, int, int) {
	var d C.struct_san_device
	var fd, vectors C.int
	C.san_context(C.san_h(ctx), &d, &fd, &vectors)
	return goDevice(&d), int(fd), int(vectors)
}

func sysQueryDevice(ctx cObject) (Caps, int) {
	var c C.struct_san_caps
	errno := C.san_query_device(C.san_h(ctx), &c)
	return Caps{
		Firmware: C.GoString(&c.firmware[0]), MaxMRSize: uint64(c.max_mr_size), VendorID: uint32(c.vendor_id),
		Flags: CapFlags(c.flags), MaxQP: int(c.max_qp), MaxQPWR: int(c.max_qp_wr),
		MaxSGE: int(c.max_sge), MaxSGERead: int(c.max_sge_rd), MaxCQE: int(c.max_cqe), MaxMR: int(c.max_mr),
		MaxQPReadAtomic: int(c.max_qp_rd_atomic), MaxQPInitiatorRead: int(c.max_qp_init_rd_atomic),
		MaxMW: int(c.max_mw), Ports: int(c.ports),
	}, int(errno)
}

func sysQueryPort(ctx cObject, port int) (Port, int) {
	var p C.struct_san_port
	errno := C.san_query_port(C.san_h(ctx), C.int(port), &p)
	return Port{
		State: PortState(p.state), ActiveMTU: MTU(p.active_mtu), GIDs: int(p.gids),
		MaxMessage: uint32(p.max_msg_sz), LID: uint16(p.lid), LinkLayer: LinkLayer(p.link_layer), Flags: PortFlags(p.flags),
	}, int(errno)
}

func sysQueryGIDs(ctx cObject, port, most int) ([]GIDEntry, int) {
	if most <= 0 {
		return nil, 0
	}
	raw := make([]C.struct_san_gid, most)
	var n C.int
	errno := C.san_query_gids(C.san_h(ctx), C.int(port), &raw[0], C.int(most), &n)
	list := make([]GIDEntry, n)
	for i := range list {
		g := &raw[i]
		list[i] = GIDEntry{Index: int(g.index), Type: GIDType(g._type), Netdev: int(g.netdev)}
		copy(list[i].GID[:], C.GoBytes(unsafe.Pointer(&g.gid[0]), C.int(len(g.gid))))
	}
	return list, int(errno)
}

func sysGetAsync(ctx cObject) (AsyncEventType, uint64, int) {
	var ev C.struct_san_async
	errno := C.san_get_async(C.san_h(ctx), &ev)
	return AsyncEventType(ev._type), uint64(ev.token), int(errno)
}

func sysPollable(fd int) (int, int) {
	var dup C.int
	errno := C.san_pollable(C.int(fd), &dup)
	return int(dup), int(errno)
}

// ---- protection domains, memory ----

func sysAllocPD(ctx cObject) (cObject, int) {
	var h C.san_h
	errno := C.san_alloc_pd(C.san_h(ctx), &h)
	return cObject(h), int(errno)
}

func sysDeallocPD(pd cObject) int { return int(C.san_dealloc_pd(C.san_h(pd))) }

func sysRegMR(pd cObject, addr uintptr, length int, access Access) (cObject, uint32, uint32, int) {
	var h C.san_h
	var lkey, rkey C.uint32_t
	errno := C.san_reg_mr(C.san_h(pd), C.uintptr_t(addr), C.size_t(length), C.uint32_t(access), &h, &lkey, &rkey)
	return cObject(h), uint32(lkey), uint32(rkey), int(errno)
}

func sysDeregMR(mr cObject) int { return int(C.san_dereg_mr(C.san_h(mr))) }

func sysAllocMW(pd cObject) (cObject, int) {
	var h C.san_h
	errno := C.san_alloc_mw(C.san_h(pd), &h)
	return cObject(h), int(errno)
}

func sysDeallocMW(mw cObject) int { return int(C.san_dealloc_mw(C.san_h(mw))) }

func sysMWKey(mw cObject) uint32 { return uint32(C.san_mw_key(C.san_h(mw))) }

// ---- queues ----

func sysCreateChannel(ctx cObject) (cObject, int, int) {
	var h C.san_h
	var fd C.int
	errno := C.san_create_channel(C.san_h(ctx), &h, &fd)
	return cObject(h), int(fd), int(errno)
}

func sysDestroyChannel(ch cObject) int { return int(C.san_destroy_channel(C.san_h(ch))) }

func sysCreateCQ(ctx cObject, size int, token uint64, ch cObject, vector int) (cObject, int) {
	var h C.san_h
	errno := C.san_create_cq(C.san_h(ctx), C.int(size), C.uint64_t(token), C.san_h(ch), C.int(vector), &h)
	return cObject(h), int(errno)
}

func sysDestroyCQ(cq cObject) int { return int(C.san_destroy_cq(C.san_h(cq))) }

func sysCreateQP(pd cObject, token uint64, sendCQ, recvCQ cObject, limits *QPCap) (cObject, uint32, int) {
	var h C.san_h
	var num C.uint32_t
	errno := C.san_create_qp(C.san_h(pd), C.uint64_t(token), C.san_h(sendCQ), C.san_h(recvCQ),
		(*C.struct_san_qp_cap)(unsafe.Pointer(limits)), &h, &num)
	return cObject(h), uint32(num), int(errno)
}

func sysDestroyQP(qp cObject) int { return int(C.san_destroy_qp(C.san_h(qp))) }

func sysCMUseQP(id, qp cObject) int { return int(C.san_cm_use_qp(C.san_h(id), C.san_h(qp))) }

func sysCMForgetQP(id cObject) { C.san_cm_forget_qp(C.san_h(id)) }

func sysModifyQP(qp cObject, attr *QPAttr, mask QPMask) int {
	return int(C.san_modify_qp(C.san_h(qp), (*C.struct_san_qp_attr)(unsafe.Pointer(attr)), C.uint32_t(mask)))
}

func sysQueryQP(qp cObject, mask QPMask) (attr QPAttr, errno int) {
	errno = int(C.san_query_qp(C.san_h(qp), (*C.struct_san_qp_attr)(unsafe.Pointer(&attr)), C.uint32_t(mask)))
	return attr, errno
}

// ---- connection manager ----

func sysCMCreateChannel() (cObject, int, int) {
	var h C.san_h
	var fd C.int
	errno := C.san_cm_create_channel(&h, &fd)
	return cObject(h), int(fd), int(errno)
}

func sysCMDestroyChannel(ch cObject) { C.san_cm_destroy_channel(C.san_h(ch)) }

func sysCMGetEvent(ch cObject, childToken uint64) (cmEvent, int) {
	var raw C.struct_san_cm_event
	if errno := C.san_cm_get_event(C.san_h(ch), C.uint64_t(childToken), &raw); errno != 0 {
		return cmEvent{}, int(errno)
	}
	p := &raw.param
	ev := cmEvent{
		id: uint64(raw.token), listener: uint64(raw.listen_token), child: cObject(raw.child),
		typ: EventType(raw._type), status: int(raw.status),
		param: ConnParam{
			ResponderResources: uint8(p.responder_resources), InitiatorDepth: uint8(p.initiator_depth),
			RetryCount: uint8(p.retry_count), RNRRetryCount: uint8(p.rnr_retry_count), QPNum: uint32(p.qp_num),
		},
	}
	if p.private_len > 0 {
		ev.param.PrivateData = C.GoBytes(unsafe.Pointer(&p.private_data[0]), C.int(p.private_len))
	}
	return ev, 0
}

func sysCMCreateID(ch cObject, token uint64) (cObject, int) {
	var h C.san_h
	errno := C.san_cm_create_id(C.san_h(ch), C.uint64_t(token), &h)
	return cObject(h), int(errno)
}

func sysCMDestroyID(id cObject) int { return int(C.san_cm_destroy_id(C.san_h(id))) }

func cAddr(a netip.AddrPort) (c C.struct_san_addr) {
	ip := a.Addr()
	c.port = C.uint16_t(a.Port())
	switch {
	case ip.Is4() || ip.Is4In6():
		c.family = 4
		for i, b := range ip.As4() {
			c.ip[i] = C.uint8_t(b)
		}
	case ip.Is6():
		c.family = 6
		for i, b := range ip.As16() {
			c.ip[i] = C.uint8_t(b)
		}
		if zone := ip.Zone(); zone != "" {
			if n, err := strconv.ParseUint(zone, 10, 32); err == nil {
				c.scope = C.uint32_t(n)
			} else if ifi, err := net.InterfaceByName(zone); err == nil {
				c.scope = C.uint32_t(ifi.Index)
			}
		}
	}
	return c
}

func goAddr(c *C.struct_san_addr) netip.AddrPort {
	var b [16]byte
	for i := range b {
		b[i] = byte(c.ip[i])
	}
	switch c.family {
	case 4:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[:4])), uint16(c.port))
	case 6:
		ip := netip.AddrFrom16(b)
		if c.scope != 0 {
			zone := strconv.Itoa(int(c.scope))
			if ifi, err := net.InterfaceByIndex(int(c.scope)); err == nil {
				zone = ifi.Name
			}
			ip = ip.WithZone(zone)
		}
		return netip.AddrPortFrom(ip, uint16(c.port))
	}
	return netip.AddrPort{}
}

func sysCMBind(id cObject, addr netip.AddrPort) int {
	a := cAddr(addr)
	return int(C.san_cm_bind(C.san_h(id), &a))
}

func sysCMResolveAddr(id cObject, src, dst netip.AddrPort, timeoutMillis int) int {
	s, d := cAddr(src), cAddr(dst)
	return int(C.san_cm_resolve_addr(C.san_h(id), &s, &d, C.int(timeoutMillis)))
}

func sysCMResolveRoute(id cObject, timeoutMillis int) int {
	return int(C.san_cm_resolve_route(C.san_h(id), C.int(timeoutMillis)))
}

func sysCMListen(id cObject, backlog int) int {
	return int(C.san_cm_listen(C.san_h(id), C.int(backlog)))
}

func cConnParam(p ConnParam) (c C.struct_san_conn_param) {
	c.qp_num = C.uint32_t(p.QPNum)
	c.responder_resources = C.uint8_t(p.ResponderResources)
	c.initiator_depth = C.uint8_t(p.InitiatorDepth)
	c.retry_count = C.uint8_t(p.RetryCount)
	c.rnr_retry_count = C.uint8_t(p.RNRRetryCount)
	c.private_len = C.uint8_t(len(p.PrivateData))
	for i, b := range p.PrivateData {
		c.private_data[i] = C.uint8_t(b)
	}
	return c
}

func sysCMConnect(id cObject, p ConnParam) int {
	c := cConnParam(p)
	return int(C.san_cm_connect(C.san_h(id), &c))
}

func sysCMAccept(id cObject, p ConnParam) int {
	c := cConnParam(p)
	return int(C.san_cm_accept(C.san_h(id), &c))
}

func sysCMReject(id cObject, private []byte) int {
	c := cConnParam(ConnParam{PrivateData: private})
	return int(C.san_cm_reject(C.san_h(id), &c.private_data[0], C.int(c.private_len)))
}

func sysCMDisconnect(id cObject) int { return int(C.san_cm_disconnect(C.san_h(id))) }

func sysCMNotify(id cObject) int { return int(C.san_cm_notify(C.san_h(id))) }

func sysCMSetOption(id cObject, option int, value []byte) int {
	return int(C.san_cm_set_option(C.san_h(id), C.int(option), unsafe.Pointer(&value[0]), C.size_t(len(value))))
}

func sysCMInfo(id cObject) cmInfo {
	var ctx C.san_h
	var src, dst C.struct_san_addr
	C.san_cm_info(C.san_h(id), &ctx, &src, &dst)
	return cmInfo{context: cObject(ctx), local: goAddr(&src), remote: goAddr(&dst)}
}
