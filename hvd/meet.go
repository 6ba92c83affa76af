package hvd

import (
	"context"
	"fmt"
	"net/url"

	"github.com/gohvd/gohvd/internal/netif"
	"github.com/gohvd/gohvd/internal/place"
	"github.com/gohvd/gohvd/store"
)

// WithStore makes the ranks meet in s instead of the store of the launcher. HOROVOD_RANK and HOROVOD_SIZE say
// which rank this is. Ranks listen on loopback unless HOROVOD_GLOO_IFACE chooses an interface. The caller
// owns s and closes it after Shutdown.
func WithStore(s store.Store) InitOption { return func(o *initOptions) { o.Store = s } }

// WithInitMethod makes the ranks meet at a URL, as PyTorch's init_process_group does:
//
//	env://                                   uses MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE
//	tcp://host:port?rank=R&world_size=N      rank 0 serves a store at this address
//	file:///path?rank=R&world_size=N         a file that all ranks can access and that does not exist yet
//
// The URL may omit rank and size if a launcher, or HOROVOD_RANK and HOROVOD_SIZE, provide them. If the ranks
// are on several hosts they need a secret, in HVD_SECRET_FILE, and with a file also an interface, in
// HOROVOD_GLOO_IFACE. The setting HVD_INIT_METHOD has the same effect for a program that passes no option.
func WithInitMethod(url string) InitOption { return func(o *initOptions) { o.Method = url } }

// An InitMethod opens the store at which the ranks of a job meet, for a URL whose scheme the program has
// registered with WithInitScheme. The query of u has rank and world_size if a launcher or the settings
// provide them. rank and size are the number of this process and the number of ranks in the job. The store is
// closed when the rank shuts down or Init fails.
type InitMethod func(ctx context.Context, u *url.URL) (s store.Store, rank, size int, err error)

// WithInitScheme registers open as the init method for URLs that begin with scheme://, in WithInitMethod and
// in the setting HVD_INIT_METHOD. Ranks listen on loopback unless HOROVOD_GLOO_IFACE chooses an interface.
func WithInitScheme(scheme string, open InitMethod) InitOption {
	return func(o *initOptions) {
		if o.Methods == nil {
			o.Methods = make(place.Methods)
		}
		o.Methods[scheme] = func(
			ctx context.Context, u *url.URL, _ place.MethodOptions,
		) (*place.Place, error) {
			s, rank, size, err := open(ctx, u)
			if err != nil {
				return nil, err
			}
			return place.New(s, rank, size), nil
		}
	}
}

// UniqueID says where the ranks of one job meet and holds the key of the job, on the model of ncclUniqueId.
// One process makes it with NewUniqueID and hands it to the others by any means. Anybody who has it can join
// the job, so treat it as a secret. It is good for one Init of all ranks.
type UniqueID [128]byte

// String returns the text of id: 171 letters, digits, '-' and '_'.
func (id UniqueID) String() string { return place.ID(id).String() }

// ParseUniqueID parses the text that String returns. Its error does not contain the text.
func ParseUniqueID(text string) (UniqueID, error) {
	id, err := place.ParseID(text)
	return UniqueID(id), err
}

// NewUniqueID makes an id. The calling process, which need not be a rank, serves the ranks until 30 s after
// all have met or until ctx ends, and must live that long. It listens on the interface that
// HOROVOD_GLOO_IFACE chooses, else on that of the default route, else on loopback.
func NewUniqueID(ctx context.Context, opts ...InitOption) (UniqueID, error) {
	o := collect(opts)
	cfg, err := o.Read()
	if err != nil {
		return UniqueID{}, fmt.Errorf("hvd: new unique id: %w", err)
	}
	choice, err := netif.Parse(cfg.NetworkInterfaces)
	if err != nil {
		return UniqueID{}, fmt.Errorf("hvd: new unique id: %w", err)
	}
	listen, err := choice.Any()
	if err != nil {
		return UniqueID{}, fmt.Errorf("hvd: new unique id: %w", err)
	}
	id, _, err := place.NewID(ctx, listen.String(), cfg.TLS, o.Log)
	if err != nil {
		return UniqueID{}, fmt.Errorf("hvd: new unique id: %w", err)
	}
	return UniqueID(id), nil
}

// InitWithID joins this process to the job of id as the given rank, as Init does. All size ranks give the
// same id. Contradictions (two sizes, two ranks with the same number, two ranks with the same device) are
// errors at all ranks. After a Shutdown the ranks need a new id.
func InitWithID(ctx context.Context, id UniqueID, rank, size int, opts ...InitOption) error {
	return Init(ctx, append(opts[:len(opts):len(opts)], WithID(rank, size, id))...)
}

// WithID makes the ranks meet by ids, which all ranks give in the same order. Use one id, or, above some
// thousand ranks, several that different processes made, which then share the connections of the ranks. The
// setting HVD_UNIQUE_ID has the same effect for a program that passes no option.
func WithID(rank, size int, ids ...UniqueID) InitOption {
	return func(o *initOptions) {
		o.ID = &place.ByID{Rank: rank, Size: size}
		for _, id := range ids {
			o.ID.IDs = append(o.ID.IDs, place.ID(id))
		}
	}
}

// WithDevice names the accelerator that this rank uses. The name is unique on its host, such as the UUID of a
// GPU. If two ranks of a host name the same device, Init fails at all ranks, unless both pass share.
func WithDevice(name string, share bool) InitOption {
	return func(o *initOptions) { o.Device, o.SharesDevice = name, share }
}

// withMeeting stores in m a meeting that cannot be repeated, for a later Init.
func withMeeting(m **place.Meeting) InitOption { return func(o *initOptions) { o.Kept = m } }
