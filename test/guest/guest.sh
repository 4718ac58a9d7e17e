#!/bin/bash
# Process 1 of the guest once the root is there: makes the devices, runs the
# command, hands back its status, switches off. $1, $2: the ports for its output.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mkfifo /run/stdout /run/stderr
cat /run/stdout >"$1" & stdout=$!
cat /run/stderr >"$2" & stderr=$!

rdma_link() { rdma link add "$1" type "${1%%[0-9]*}" netdev "$2"; }

# pair A B NET4 NET6 N: a veth pair whose ends have NET4.1 and NET4.2, NET6::1 and
# NET6::2 in this one namespace, with routes that make packets cross it.
pair() {
	local a=$1 b=$2 n4=$3 n6=$4 n=$5 i dev peer
	ip link add "$a" mtu "$guest_mtu" type veth peer name "$b" mtu "$guest_mtu"
	sysctl -qw net.ipv4.conf.{all,"$a","$b"}.{rp_filter=0,accept_local=1} net.ipv6.conf.{"$a","$b"}.accept_dad=0
	for i in 1 2; do
		[ $i = 1 ] && dev=$a peer=2 || { dev=$b; peer=1; }
		ip addr add "$n4.$i/32" dev "$dev"
		ip -6 addr add "$n6::$i/128" dev "$dev" nodad
		ip link set "$dev" up
		ip route add "$n4.$peer" dev "$dev" src "$n4.$i" table 10"$n"
		ip -6 route add "$n6::$peer" dev "$dev" src "$n6::$i" table 10"$n"
		# A listener of rdma_cm checks that the route to the peer leaves by the
		# device that the request came in on.
		ip rule add pref "$((i + 1))$n" oif "$dev" to "$n4.$peer" lookup 10"$n"
		ip -6 rule add pref "$((i + 1))$n" oif "$dev" to "$n6::$peer" lookup 10"$n"
	done
	ip rule add pref 1"$n" iif lo to "$n4.0/30" lookup 10"$n"
	ip -6 rule add pref 1"$n" iif lo to "$n6::/126" lookup 10"$n"
}

network() {
	ip link set lo up
	case $guest_topology in
	single)
		local i
		for i in 0 1; do
			ip link add dummy$i mtu "$guest_mtu" type dummy
			ip addr add 10.9.$i.1/24 dev dummy$i
			ip link set dummy$i up
		done
		rdma_link rxe0 dummy0 && rdma_link siw0 dummy1
		;;
	pair)
		pair ve1 ve2 10.8.0 fd08 1
		pair wi1 wi2 10.8.1 fd08:1 2
		# Our own addresses last, after the rules of the pairs.
		for v in -4 -6; do ip $v rule add pref 100 lookup local && ip $v rule del pref 0; done
		rdma_link rxe1 ve1 && rdma_link rxe2 ve2 && rdma_link siw1 wi1 && rdma_link siw2 wi2
		;;
	esac
}

# remains is what a command that failed leaves behind: its cause may be the kernel's.
remains() {
	echo "guest: the command failed; devices, addresses and the end of the kernel's log then:"
	rdma link
	rdma resource
	ip -br addr
	dmesg | tail -30
}

(
	exec >/run/stdout 2>/run/stderr
	touch /run/guest/started
	network || { echo "guest: cannot make the RDMA devices" >&2; exit; }
	ulimit -l unlimited
	ulimit -n 65536
	. /run/guest/environment
	export GUEST_OUT=/run/guest/out
	if [ -s /run/guest/command ]; then
		eval "set -- $(cat /run/guest/command)"
		"$@" </dev/null
		status=$?
		[ $status = 0 ] || remains >&2
	else
		setsid -c bash -i </dev/hvc0 >/dev/hvc0 2>&1
		status=$?
	fi
	echo $status >/run/guest/status
)
wait $stdout $stderr
sync
echo b >/proc/sysrq-trigger # a reset: QEMU exits by -no-reboot
sleep 9
