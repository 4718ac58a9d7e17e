// The file that the processes on one simulated fabric share. All bytes between two devices go
// through it as packets. A process's engine takes the packets that are addressed to its queue
// pairs, and accesses only the memory of its own process.
//
// Processes hold no locks here: each ring has one producer and one consumer, and each struct
// proc is written only by its owner. So no process waits for one that was killed.
#ifndef HWSIM_SHARED_H
#define HWSIM_SHARED_H

#include <stdatomic.h>
#include <stdint.h>

enum {
	PROCS = 8, // processes at the same time
	RING_BYTES = 1 << 20, // from one process to another
	LISTENERS = 1024, // of a process
	COUNTS = 32, // words per process that hwsim.go reads
};

// The counts of a process, as in hwsim.go: objects that exist, and events.
enum count {
	N_CONTEXT, N_PD, N_MR, N_MW, N_CHANNEL, N_CQ, N_QP, N_SRQ, N_EVENT_CHANNEL, N_ID,
	N_OBJECTS,
	// the program broke a rule that a device need not enforce; the last complaint is on
	// its standard error
	N_COMPLAINTS = 16,
	N_ATTACHED, // processes that have used the slot
	N_SENDS, N_WRITES, N_READS, N_BINDS, N_INVALIDATES, // work requests executed
	N_RNR, N_RETRIES, N_COMM_EST, N_LATE_PIECES, // the last: pieces written after their queue pair had broken
	N_INLINE,
	N_RELAXED, // of N_MR: those with relaxed ordering
};

// A packet's header; its payload follows. Sizes are multiples of 64 bytes.
struct packet {
	_Alignas(64) uint32_t size; // with the payload
	uint8_t type;
	uint8_t flags;
	uint8_t code; // of a NAK; in a request the MTU of its path
	uint8_t timer; // of an RNR NAK
	uint32_t to, from; // queue pairs; ids of the connection manager
	uint32_t msn; // message sequence number
	uint32_t offset, bytes; // of the payload in its message
	uint32_t length; // of the message
	uint32_t imm; // immediate data, or the key to invalidate
	uint32_t rkey;
	uint64_t raddr;
	uint64_t due; // in timed mode: when it arrives
};
_Static_assert(sizeof(struct packet) == 64, "header");

enum packet_type { P_PAD, P_SEND, P_WRITE, P_READ, P_RESPONSE, P_ACK, P_NAK, P_CM };
enum packet_flag { F_LAST = 1, F_IMM = 2, F_INV = 4, F_SOLICITED = 8, F_UNMOVED = 16 }; // the last: without its payload
enum nak { NAK_RNR, NAK_SEQUENCE, NAK_REQUEST, NAK_ACCESS, NAK_OPERATION };

struct ring {
	_Alignas(64) _Atomic uint64_t head; // bytes written, by the producer
	_Alignas(64) _Atomic uint64_t tail; // bytes taken, by the consumer
	_Alignas(64) uint8_t data[RING_BYTES];
};

struct listener {
	_Atomic uint32_t handle; // handle of its id; 0: none
	uint16_t family, port; // port in host order
	uint8_t ip[16];
};

struct proc {
	_Alignas(64) _Atomic uint32_t bell; // futex: there is work
	_Atomic uint32_t asleep; // its engine waits for the bell
	_Atomic uint32_t listens; // in timed mode: packets ring the bell
	_Atomic uint32_t next_qpn, next_handle, next_port; // continued by the slot's next process
	struct listener listeners[LISTENERS];
};

struct shared {
	_Atomic int64_t counts[PROCS][COUNTS];
	_Alignas(64) _Atomic uint32_t resets; // of all devices; hwsim.go increments it
	struct proc procs[PROCS];
	struct ring rings[PROCS][PROCS]; // [from][to]
};

// The upper bits of a queue pair's number, and of an id's handle, are the slot of its process.
enum { SLOT_SHIFT = 20 };
static inline int slot_of(uint32_t number) { return number >> SLOT_SHIFT; }

#endif
