BEGIN TRANSACTION;
CREATE TABLE history (
            queue TEXT NOT NULL, pool TEXT NOT NULL,
            gpus REAL NOT NULL,
            at TEXT NOT NULL,
            PRIMARY KEY (queue, pool)
        ) STRICT;
INSERT INTO "history" VALUES('research','A100',0.2278,'2026-01-01T01:00:00+00:00');
CREATE TABLE leases (
            id TEXT PRIMARY KEY,
            uid TEXT NOT NULL, step TEXT NOT NULL, node TEXT NOT NULL,
            request TEXT NOT NULL,
            pool TEXT NOT NULL,
            granted_at TEXT NOT NULL,
            check_at TEXT NOT NULL, nodes TEXT NOT NULL DEFAULT '[]', leaving TEXT,
            UNIQUE (uid, step, node)
        ) STRICT;
INSERT INTO "leases" VALUES('7cb3c084c0a16641','u2','sweep.0123456789ab.0','wf-u2.sweep(0:lr:0.1)[0].attempts(0)[0].admit','{"uid": "u2", "step": "sweep.0123456789ab.0", "node": "wf-u2.sweep(0:lr:0.1)[0].attempts(0)[0].admit", "namespace": "ml", "workflow": "wf-u2", "instance": "wf-u2.sweep(0:lr:0.1)", "run": "run-u2", "attempt": 1, "queue": "research", "gpus": 4, "gpu_type": "A100", "min_gpu_memory_mb": null, "priority": 0, "seconds": null, "members": 2, "tensor_parallel": 1, "min_members": 1, "max_members": 2}','A100','2026-01-01T01:00:00+00:00','2026-01-01T01:00:00+00:00','[]',NULL);
CREATE TABLE waiting (
            arrival INTEGER PRIMARY KEY AUTOINCREMENT,
            uid TEXT NOT NULL, step TEXT NOT NULL, node TEXT NOT NULL,
            request TEXT NOT NULL,
            since TEXT NOT NULL,
            seen_at TEXT NOT NULL, promised_at TEXT,
            UNIQUE (uid, step, node)
        ) STRICT;
INSERT INTO "waiting" VALUES(1,'u3','fit','u3.fit[0].attempts(0)[0].admit','{"uid": "u3", "step": "fit", "node": "u3.fit[0].attempts(0)[0].admit", "namespace": "ml", "workflow": "wf-u3", "instance": "wf-u3.fit", "run": "run-u3", "attempt": 1, "queue": "research", "gpus": 8, "gpu_type": "A100", "min_gpu_memory_mb": null, "priority": 5, "seconds": null, "members": 1, "tensor_parallel": 1, "spot": "allowed"}','2026-01-01T01:00:00+00:00','2026-01-01T01:00:00+00:00',NULL);
INSERT INTO "waiting" VALUES(2,'u4','fit','u4.fit[0].attempts(0)[0].admit','{"uid": "u4", "step": "fit", "node": "u4.fit[0].attempts(0)[0].admit", "namespace": "ml", "workflow": "wf-u4", "instance": "wf-u4.fit", "run": "run-u4", "attempt": 1, "queue": "research", "gpus": 2, "gpu_type": "A100", "min_gpu_memory_mb": 1000, "priority": 0, "seconds": 3600, "members": 1, "tensor_parallel": 1}','2026-01-01T01:00:00+00:00','2026-01-01T01:00:00+00:00',NULL);
INSERT INTO "waiting" VALUES(3,'u1','fit','u1.fit[0].attempts(1)[0].admit','{"uid": "u1", "step": "fit", "node": "u1.fit[0].attempts(1)[0].admit", "namespace": "ml", "workflow": "wf-u1", "instance": "wf-u1.fit", "run": "run-u1", "attempt": 2, "queue": "research", "gpus": 4, "gpu_type": "A100", "min_gpu_memory_mb": null, "priority": 0, "seconds": null, "members": 1, "tensor_parallel": 1}','2026-01-01T01:00:00+00:00','2026-01-01T01:00:00+00:00',NULL);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('waiting',3);
COMMIT;
PRAGMA user_version = 4;
