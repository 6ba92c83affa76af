package doctor

import (
	"context"
	"io/fs"

	"golang.org/x/sys/unix"
)

// getrlimitFix is the fix if getrlimit fails. getrlimit fails only in a sandbox.
const getrlimitFix = "run in a sandbox that permits getrlimit"

// fileSize checks the limit for the size of files, because the limit also applies to memfds.
func fileSize(_ context.Context, s *System) []Line {
	r, err := s.Rlimit(unix.RLIMIT_FSIZE)
	switch {
	case err != nil:
		return []Line{warn("", getrlimitFix, "%v", err)}
	case r.Cur < lowBytes:
		return []Line{warn("", "ulimit -f unlimited, or LimitFSIZE=infinity in the service",
			"%s (RLIMIT_FSIZE): the limit applies to shared memory too, so no tensor there can be larger",
			limitText(r.Cur))}
	default:
		return []Line{ok("", "%s (RLIMIT_FSIZE)", limitText(r.Cur))}
	}
}

// lockedMemory checks the limit for locked memory, which matters for network cards that access memory
// directly (RDMA).
func lockedMemory(_ context.Context, s *System) []Line {
	r, err := s.Rlimit(unix.RLIMIT_MEMLOCK)
	if err != nil {
		return []Line{warn("", getrlimitFix, "%v", err)}
	}
	cards, err := fs.Glob(s.Root, "dev/infiniband/uverbs*")
	switch found := limitText(r.Cur) +
		" (RLIMIT_MEMLOCK); gohvd locks no memory, but NCCL and MPI do with InfiniBand"; {
	case err == nil && len(cards) > 0 && r.Cur != unix.RLIM_INFINITY:
		return []Line{warn("",
			"ulimit -l unlimited, docker --ulimit memlock=-1, or LimitMEMLOCK=infinity in the service",
			"%s, which this host has", found)}
	default:
		return []Line{ok("", "%s", found)}
	}
}

const (
	// filesPerPeer is the number of sockets between rank 0 and each other rank. filesPerLocal is the number
	// of files, during Init, that the lowest rank of a host has open for each rank with which it shares
	// memory.
	filesPerPeer, filesPerLocal = 2, 4
	// filesOwn is the approximate number of other files that a rank has open: its output, poller, listeners,
	// store and shared memory.
	filesOwn = 32
	// A limit below fewFiles is too low for large jobs. A limit below tooFewFiles is too low for most jobs.
	fewFiles, tooFewFiles = 1024, 128
)

const openFilesFix = "raise the hard limit: ulimit -Hn 65536, docker --ulimit nofile=65536, or LimitNOFILE=65536 in the service"

// openFiles checks the limit for open files. This is the hard limit, to which the Go runtime has raised the
// soft limit of this process, and to which a rank that needs more raises its own.
func openFiles(_ context.Context, s *System) []Line {
	r, err := s.Rlimit(unix.RLIMIT_NOFILE)
	if err != nil {
		return []Line{warn("", getrlimitFix, "%v", err)}
	}
	const format = "%d (RLIMIT_NOFILE): the lowest rank of a host needs up to %d files for each other rank there, " +
		"and rank 0 %d for each rank on another host, enough for %d ranks on its host or %d on others"
	left := r.Cur - min(r.Cur, filesOwn)
	values := []any{r.Cur, filesPerLocal, filesPerPeer, left/filesPerLocal + 1, left/filesPerPeer + 1}
	switch {
	case r.Cur == unix.RLIM_INFINITY:
		return []Line{ok("", "unlimited (RLIMIT_NOFILE)")}
	case r.Cur < tooFewFiles:
		return []Line{fail("", openFilesFix, format, values...)}
	case r.Cur < fewFiles:
		return []Line{warn("", openFilesFix, format, values...)}
	default:
		return []Line{ok("", format, values...)}
	}
}
