{{/*
Service account of a component and what it may do: a Role in its own namespace, and one in each workflow namespace,
or a ClusterRole for all. Takes a dict of root, component and settings (its values).
*/}}
{{- define "tiphys.rbac" -}}
{{- $root := .root -}}
{{- $component := .component -}}
{{- $name := printf "%s-%s" $root.Release.Name $component -}}
{{- $account := dict "name" $name "namespace" $root.Release.Namespace -}}
{{- $rules := include (printf "tiphys.rules.%s.workflows" $component) $root -}}
{{ include "tiphys.serviceAccount" . }}
---
{{ include "tiphys.role" (dict "root" $root "namespace" $root.Release.Namespace "name" $name "account" $account "rules" (include (printf "tiphys.rules.%s.home" $component) $root)) }}
{{- if $root.Values.clusterWide }}
---
{{ include "tiphys.clusterRole" (dict "root" $root "component" (printf "%s-workflows" $component) "account" $account "rules" $rules) }}
{{- else }}
{{- range include "tiphys.namespaces" $root | fromJsonArray }}
---
{{ include "tiphys.role" (dict "root" $root "namespace" . "name" (printf "%s-workflows" $name) "account" $account "rules" $rules) }}
{{- end }}
{{- end }}
{{- end }}

{{/* A Role and its binding to one account. Takes a dict of root, namespace, name, account and rules. */}}
{{- define "tiphys.role" -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ .name }}
  namespace: {{ .namespace }}
  labels:
    {{- include "tiphys.labels" .root | nindent 4 }}
rules:
  {{- .rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ .name }}
  namespace: {{ .namespace }}
  labels:
    {{- include "tiphys.labels" .root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ .name }}
subjects:
  - kind: ServiceAccount
    name: {{ .account.name }}
    namespace: {{ .account.namespace }}
{{- end }}

{{/* The same for the whole cluster. Takes a dict of root, component, account and rules. */}}
{{- define "tiphys.clusterRole" -}}
{{- $name := include "tiphys.clusterName" . -}}
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata:
  name: {{ $name }}
  labels:
    {{- include "tiphys.labels" .root | nindent 4 }}
rules:
  {{- .rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata:
  name: {{ $name }}
  labels:
    {{- include "tiphys.labels" .root | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: ClusterRole
  name: {{ $name }}
subjects:
  - kind: ServiceAccount
    name: {{ .account.name }}
    namespace: {{ .account.namespace }}
{{- end }}

{{/* Service account of a component. Takes a dict of root, component and settings (its values). */}}
{{- define "tiphys.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ .root.Release.Name }}-{{ .component }}
  namespace: {{ .root.Release.Namespace }}
  labels:
    {{- include "tiphys.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ .component }}
  {{- with .settings.serviceAccount.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}
