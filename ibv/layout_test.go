//go:build linux && cgo

package ibv

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sanconn/san/internal/testenv"
)

// compile checks C source against rdma-core's headers.
func compile(t *testing.T, file string) error {
	t.Helper()
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	check := exec.Command(cc, "-fsyntax-only", "-Wall", "-Werror", file)
	check.Env = append(os.Environ(), "LC_ALL=C")
	out, err := check.CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) || bytes.Contains(out, []byte("rdma_cma.h: No such file")) {
		testenv.Missing(t, fmt.Sprintf("a C compiler, libibverbs-dev and librdmacm-dev: %v\n%s", err, out))
	}
	if err != nil {
		return fmt.Errorf("%w\n%s", err, out)
	}
	return nil
}

func TestMirroredStructsAreTheSystems(t *testing.T) {
	if err := compile(t, "testdata/layout.c"); err != nil {
		t.Fatalf("abi_linux.h differs from the system's headers: %v", err)
	}
}

// The comparison finds a wrong offset.
func TestAWrongOffsetIsFound(t *testing.T) {
	source := "#include \"" + abs(t, "testdata/layout.c") + "\"\nSAME(abi_wc, struct ibv_send_wr, opcode);\n"
	if err := compile(t, write(t, source)); err == nil || !strings.Contains(err.Error(), "static assertion failed") {
		t.Fatalf("a wrong offset was not found: %v", err)
	}
}

func TestMirroredConstantsAreTheSystems(t *testing.T) {
	constants := map[string]int{
		"IBV_TRANSPORT_IB": int(TransportIB), "IBV_TRANSPORT_IWARP": int(TransportIWARP),
		"IBV_DEVICE_MEM_WINDOW":         int(CapMemWindow),
		"IBV_DEVICE_MEM_WINDOW_TYPE_2A": int(CapMemWindow2A), "IBV_DEVICE_MEM_WINDOW_TYPE_2B": int(CapMemWindow2B),
		"IBV_QPF_GRH_REQUIRED": int(PortGRHRequired), "IBV_PORT_DOWN": int(PortDown), "IBV_PORT_INIT": int(PortInit), "IBV_PORT_ARMED": int(PortArmed), "IBV_PORT_ACTIVE": int(PortActive),
		"IBV_LINK_LAYER_UNSPECIFIED": int(LinkUnspecified), "IBV_LINK_LAYER_INFINIBAND": int(LinkInfiniBand), "IBV_LINK_LAYER_ETHERNET": int(LinkEthernet),
		"IBV_GID_TYPE_IB": int(GIDTypeIB), "IBV_GID_TYPE_ROCE_V1": int(GIDTypeRoCEv1), "IBV_GID_TYPE_ROCE_V2": int(GIDTypeRoCEv2),
		"IBV_ACCESS_LOCAL_WRITE": int(LocalWrite), "IBV_ACCESS_REMOTE_WRITE": int(RemoteWrite), "IBV_ACCESS_REMOTE_READ": int(RemoteRead),
		"IBV_ACCESS_MW_BIND": int(MWBind), "IBV_ACCESS_RELAXED_ORDERING": int(RelaxedOrdering), "IBV_ACCESS_OPTIONAL_RANGE": 0x3ff00000,
		"IBV_WR_RDMA_WRITE": int(OpWrite), "IBV_WR_RDMA_WRITE_WITH_IMM": int(OpWriteWithImm), "IBV_WR_SEND": int(OpSend),
		"IBV_WR_SEND_WITH_IMM": int(OpSendWithImm), "IBV_WR_RDMA_READ": int(OpRead), "IBV_WR_LOCAL_INV": int(OpLocalInv),
		"IBV_WR_BIND_MW": int(OpBindMW), "IBV_WR_SEND_WITH_INV": int(OpSendWithInv),
		"IBV_SEND_SIGNALED": int(Signaled), "IBV_SEND_INLINE": int(Inline),
		"IBV_WC_SEND": int(WCSend), "IBV_WC_RDMA_WRITE": int(WCWrite), "IBV_WC_RDMA_READ": int(WCRead), "IBV_WC_BIND_MW": int(WCBindMW),
		"IBV_WC_LOCAL_INV": int(WCLocalInv), "IBV_WC_RECV": int(WCRecv), "IBV_WC_RECV_RDMA_WITH_IMM": int(WCRecvImm),
		"IBV_WC_WITH_IMM": int(WCWithImm), "IBV_WC_WITH_INV": int(WCWithInv),
		"IBV_WC_SUCCESS": int(Success), "IBV_WC_LOC_LEN_ERR": int(LocLenErr), "IBV_WC_LOC_QP_OP_ERR": int(LocQPOpErr),
		"IBV_WC_LOC_PROT_ERR": int(LocProtErr), "IBV_WC_WR_FLUSH_ERR": int(WRFlushErr), "IBV_WC_MW_BIND_ERR": int(MWBindErr),
		"IBV_WC_BAD_RESP_ERR": int(BadRespErr), "IBV_WC_LOC_ACCESS_ERR": int(LocAccessErr), "IBV_WC_REM_INV_REQ_ERR": int(RemInvReqErr),
		"IBV_WC_REM_ACCESS_ERR": int(RemAccessErr), "IBV_WC_REM_OP_ERR": int(RemOpErr), "IBV_WC_RETRY_EXC_ERR": int(RetryExcErr),
		"IBV_WC_RNR_RETRY_EXC_ERR": int(RNRRetryExcErr), "IBV_WC_REM_ABORT_ERR": int(RemAbortErr), "IBV_WC_FATAL_ERR": int(FatalErr),
		"IBV_WC_RESP_TIMEOUT_ERR": int(RespTimeoutErr), "IBV_WC_GENERAL_ERR": int(GeneralErr),
		"IBV_QPS_RESET": int(QPReset), "IBV_QPS_INIT": int(QPInit), "IBV_QPS_RTR": int(QPRTR), "IBV_QPS_RTS": int(QPRTS), "IBV_QPS_SQD": int(QPSQD),
		"IBV_QPS_SQE": int(QPSQE), "IBV_QPS_ERR": int(QPError),
		"IBV_QP_STATE": int(MaskState), "IBV_QP_ACCESS_FLAGS": int(MaskAccess), "IBV_QP_PKEY_INDEX": int(MaskPKeyIndex), "IBV_QP_PORT": int(MaskPort),
		"IBV_QP_AV": int(MaskAV), "IBV_QP_PATH_MTU": int(MaskPathMTU), "IBV_QP_TIMEOUT": int(MaskTimeout), "IBV_QP_RETRY_CNT": int(MaskRetryCount),
		"IBV_QP_RNR_RETRY": int(MaskRNRRetry), "IBV_QP_RQ_PSN": int(MaskRQPSN), "IBV_QP_MAX_QP_RD_ATOMIC": int(MaskMaxReadAtomic),
		"IBV_QP_MIN_RNR_TIMER": int(MaskMinRNRTimer), "IBV_QP_SQ_PSN": int(MaskSQPSN), "IBV_QP_MAX_DEST_RD_ATOMIC": int(MaskMaxDestReadAtomic),
		"IBV_QP_DEST_QPN":  int(MaskDestQPN),
		"IBV_EVENT_CQ_ERR": int(EventCQErr), "IBV_EVENT_QP_FATAL": int(EventQPFatal), "IBV_EVENT_QP_REQ_ERR": int(EventQPReqErr),
		"IBV_EVENT_QP_ACCESS_ERR": int(EventQPAccessErr), "IBV_EVENT_COMM_EST": int(EventCommEst),
		"IBV_EVENT_SQ_DRAINED": 5, "IBV_EVENT_PATH_MIG": 6, "IBV_EVENT_PATH_MIG_ERR": 7, // these are events of queue pairs too
		"IBV_EVENT_DEVICE_FATAL": int(EventDeviceFatal), "IBV_EVENT_PORT_ACTIVE": int(EventPortActive), "IBV_EVENT_PORT_ERR": int(EventPortErr),
		"RDMA_CM_EVENT_ADDR_RESOLVED": int(AddrResolved), "RDMA_CM_EVENT_ADDR_ERROR": int(AddrError), "RDMA_CM_EVENT_ROUTE_RESOLVED": int(RouteResolved),
		"RDMA_CM_EVENT_ROUTE_ERROR": int(RouteError), "RDMA_CM_EVENT_CONNECT_REQUEST": int(ConnectRequest), "RDMA_CM_EVENT_CONNECT_RESPONSE": int(ConnectResponse),
		"RDMA_CM_EVENT_CONNECT_ERROR": int(ConnectError), "RDMA_CM_EVENT_UNREACHABLE": int(Unreachable), "RDMA_CM_EVENT_REJECTED": int(Rejected),
		"RDMA_CM_EVENT_ESTABLISHED": int(Established), "RDMA_CM_EVENT_DISCONNECTED": int(Disconnected), "RDMA_CM_EVENT_DEVICE_REMOVAL": int(DeviceRemoval),
		"RDMA_CM_EVENT_ADDR_CHANGE": int(AddrChange), "RDMA_CM_EVENT_TIMEWAIT_EXIT": int(TimewaitExit),
		"RDMA_OPTION_ID": 0, "RDMA_OPTION_ID_ACK_TIMEOUT": optionAckTimeout,
		"RDMA_PS_TCP": 0x0106, "IBV_QPT_RC": 2, "IBV_MW_TYPE_2": 2, "IBV_FORK_UNNEEDED": 2, // used by shim_linux.c
	}
	var source strings.Builder
	source.WriteString("#include <rdma/rdma_cma.h>\n")
	for name, value := range constants {
		fmt.Fprintf(&source, "_Static_assert((long)(%s) == %d, \"%s\");\n", name, value, name)
	}
	if err := compile(t, write(t, source.String())); err != nil {
		t.Fatalf("constants differ from the system's headers: %v", err)
	}
}

func abs(t *testing.T, path string) string {
	t.Helper()
	p, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func write(t *testing.T, source string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "check.c")
	if err := os.WriteFile(file, []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}
