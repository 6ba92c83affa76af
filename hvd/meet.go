package hvd

import (
	"context"
	"net/url"

	"github.com/gohvd/gohvd/internal/bootstrap"
	"github.com/gohvd/gohvd/internal/rank"
	"github.com/gohvd/gohvd/store"
)

// WithStore makes the ranks meet in s instead of the store of the launcher. The rank and the number of ranks
// come from HOROVOD_RANK and HOROVOD_SIZE, or else from the launcher. Init fails if neither has them, or if
// the program also passes WithInitMethod or WithID. Ranks listen on loopback unless HOROVOD_GLOO_IFACE
// chooses an interface. The caller owns s and closes it after Shutdown.
func WithStore(s store.Store) InitOption { return initOption(func(o *initOptions) { o.Store = s }) }

// WithInitMethod makes the ranks meet at a URL, as PyTorch's init_process_group does:
//
//	env://                                   uses MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE
//	tcp://host:port?rank=R&world_size=N      rank 0 serves a store at this address
//	file:///path?rank=R&world_size=N         a file that all ranks can access and that does not exist yet
//
// The URL may omit rank and world_size if a launcher, or HOROVOD_RANK and HOROVOD_SIZE, provide them.
// Otherwise Init fails, as it does with an unknown scheme. If the ranks are on several hosts, HVD_SECRET_FILE
// must name a file with a secret. If ranks on several hosts meet at a file, HOROVOD_GLOO_IFACE must also
// choose an interface. The setting HVD_INIT_METHOD has the same effect for a program that passes no option.
// The default is the store of the launcher.
func WithInitMethod(url string) InitOption {
	return initOption(func(o *initOptions) { o.Method = url })
}

// An InitMethod opens the store at which the ranks of a job meet. It is called with a URL u whose scheme the
// program has registered with WithInitScheme. If a launcher or the settings provide rank and size, the query
// of u contains them as rank and world_size. The InitMethod returns the number of this process as rank and
// the number of ranks in the job as size. The store is closed when the rank shuts down or Init fails.
type InitMethod func(ctx context.Context, u *url.URL) (s store.Store, rank, size int, err error)

// WithInitScheme registers open as the init method for URLs that begin with scheme://. By default only the
// schemes of WithInitMethod are known. The URL may come from WithInitMethod or from the setting
// HVD_INIT_METHOD. Ranks listen on loopback unless HOROVOD_GLOO_IFACE chooses an interface.
func WithInitScheme(scheme string, open InitMethod) InitOption {
	return initOption(func(o *initOptions) {
		if o.Methods == nil {
			o.Methods = make(bootstrap.Methods)
		}
		o.Methods[scheme] = func(
			ctx context.Context, u *url.URL, _ bootstrap.MethodOptions,
		) (*bootstrap.Place, error) {
			s, rank, size, err := open(ctx, u)
			if err != nil {
				return nil, err
			}
			return bootstrap.New(s, rank, size), nil
		}
	})
}

// UniqueID says where the ranks of one job meet, and holds the key of the job. It is modeled on ncclUniqueId.
// One process makes it with NewUniqueID and passes it to the other processes by any means. Every process that
// has it can join the job, so treat it as a secret. The ranks can use it for only one Init.
type UniqueID [128]byte

// String returns id as text: 171 letters, digits, '-' and '_'.
func (id UniqueID) String() string { return bootstrap.ID(id).String() }

// ParseUniqueID parses the text that String returns. Space around the text is ignored. If the text has
// another length, or its check sum is wrong, ParseUniqueID returns an error, which does not contain the text.
func ParseUniqueID(text string) (UniqueID, error) {
	id, err := bootstrap.ParseID(text)
	return UniqueID(id), public(err)
}

// NewUniqueID makes an id and returns at once. The calling process need not be a rank. It serves the ranks in
// the background until ctx ends or until 30 s after all ranks have met, and it must not exit earlier. It
// listens on the interface that HOROVOD_GLOO_IFACE chooses. If that setting is empty, it listens on the
// interface of the default route, or on loopback if there is no default route. The options WithSetting and
// WithLogger apply. The error says that a setting is wrong, that no interface or port can be used, or that
// ctx has ended.
func NewUniqueID(ctx context.Context, opts ...InitOption) (UniqueID, error) {
	o := collect(opts)
	id, _, err := o.NewID(ctx)
	return UniqueID(id), public(err)
}

// InitWithID joins this process to the job of id, as the given rank. Apart from that, it does what Init does.
// All ranks must pass the same id and the same size. If ranks contradict each other (two sizes, two ranks
// with the same number, two ranks with the same device), all ranks get an error. After a Shutdown the ranks
// need a new id.
func InitWithID(ctx context.Context, id UniqueID, rank, size int, opts ...InitOption) error {
	return Init(ctx, append(opts[:len(opts):len(opts)], WithID(rank, size, id))...)
}

// WithID makes the ranks meet by ids. All ranks must pass the same ids in the same order. One id is enough
// for up to a few thousand ranks. For more ranks, pass several ids that different processes made, so that
// these processes share the connections of the ranks. Init fails if there is no id, if there are more ids
// than ranks, or if an id is not one of NewUniqueID. The setting HVD_UNIQUE_ID has the same effect for a
// program that passes no option.
func WithID(rank, size int, ids ...UniqueID) InitOption {
	return initOption(func(o *initOptions) {
		o.ID = &bootstrap.ByID{Rank: rank, Size: size}
		for _, id := range ids {
			o.ID.IDs = append(o.ID.IDs, bootstrap.ID(id))
		}
	})
}

// WithMPICommunicator makes the processes of an MPI communicator the ranks of the job, with the same numbers.
// By default, all processes that mpirun has started are. handle is the communicator's Fortran handle
// (MPI_Comm_c2f in C, py2f in mpi4py). All processes of the communicator must pass it to Init. The program
// must have initialized MPI, and finalizes it after Shutdown. The option makes mpi the default of
// HOROVOD_CONTROLLER (docs/mpi.md).
func WithMPICommunicator(handle int32) InitOption {
	return initOption(func(o *initOptions) { o.MPIComm = &handle })
}

// WithDevice names the accelerator that this rank uses. By default it has no name, and nothing is checked.
// The name must identify the device on its host, as the UUID of a GPU does. If two ranks of a host name the
// same device, Init fails at all ranks, unless both of these ranks pass true for share.
func WithDevice(name string, share bool) InitOption {
	return initOption(func(o *initOptions) { o.Device, o.SharesDevice = name, share })
}

// withMeeting makes the engine store its meeting in *m if the ranks cannot meet again, so that a later Init
// can use the same meeting.
func withMeeting(m **bootstrap.Meeting) InitOption {
	return initOption(func(o *initOptions) { o.Kept = m })
}

// withMember makes the engine store its part in an elastic job in *m, so that a later Init uses it again.
func withMember(m **rank.Membership) InitOption {
	return initOption(func(o *initOptions) { o.Member = m })
}
